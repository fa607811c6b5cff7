"""The ASGI application that agents and trainers talk to: one module per wire API."""

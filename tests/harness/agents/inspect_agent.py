import files
import inspect_ai
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import tool


@tool
def read_file():
    async def execute(path: str) -> str:
        """Return the text of a file.

        Args:
            path: The file.

        """
        return files.read_file(path)

    return execute


@tool
def write_file():
    async def execute(path: str, text: str) -> str:
        """Write a file.

        Args:
            path: The file.
            text: Its new text.

        """
        return files.write_file(path, text)

    return execute


task = inspect_ai.Task(dataset=[Sample(files.QUESTION)], solver=react(tools=[read_file(), write_file()], submit=False))
model = get_model("openai-api/local/m", base_url=files.BASE_URL, api_key="none", stream=files.STREAM)
(log,) = inspect_ai.eval(task, model=model, display="none")
print(log.status, log.samples[0].output.completion)

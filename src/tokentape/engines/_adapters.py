"""LoRA adapters of the embedded engine, loaded with peft. Rows of one batch may use different adapters.

The model with adapters is a second module tree that shares the base model's weights. So scores, which another thread
computes with the base model, never pass through an adapter.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokentape.engines._loading import refuse_unbatchable
from tokentape.errors import EngineError


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter."""

    key: str
    """The name in peft, unique to this version."""
    version: str


class Adapters:
    """The adapters of a model. A version stays loaded while a call uses it. Use it only on the worker's thread."""

    def __init__(self, model: Any, *, dtype: str) -> None:
        self._model, self._dtype = model, dtype
        self._serial = 0
        self.current: dict[str, Adapter] = {}
        """The newest version of each adapter, by name."""
        self.with_all: Any = None
        """The model with all adapters; None until an adapter is loaded."""

    @torch.inference_mode(mode=False)
    def load(self, name: str, folder: Path, version: str, used: Collection[str] = ()) -> None:
        """Load a version of the adapter `name`, and drop older ones, except those with a key in `used`.

        Raises `EngineError` if peft is missing, if the folder has no LoRA adapter for this model, or if logprobs with
        the adapter differ between a batch and a single row.
        """
        try:
            from peft import LoraConfig, PeftModel
        except ImportError:
            raise EngineError("LoRA adapters in the embedded engine need peft: pip install peft") from None
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / file).is_file():
                raise EngineError(f"no {file} in {folder}; expected a folder that peft's save_pretrained wrote")
        self._serial += 1
        key = f"version{self._serial:09}"
        try:
            # Read the file itself, because peft drops settings that it does not know. An empty one has no effect.
            settings, plain = json.loads((folder / "adapter_config.json").read_bytes()), vars(LoraConfig())
            changed = {one for one, value in settings.items() if value and value not in (plain.get(one), "gaussian")}
            if unsupported := {one: settings[one] for one in sorted(changed - _SUPPORTED)}:
                raise EngineError(f"only plain LoRA adapters are supported, and its config sets {unsupported}")
            config = LoraConfig.from_pretrained(str(folder))
            if self.with_all is None:
                shared = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
                self.with_all = PeftModel(copy.deepcopy(self._model, shared), config, adapter_name=key)
            report = self.with_all.load_adapter(str(folder), key, torch_device=str(self._model.device))
            self.with_all.eval()
            strange = [
                *report.unexpected_keys,
                *(missing for missing in report.missing_keys if f".{key}." in missing),
            ]
            if strange:
                raise EngineError(
                    f"the adapter and the model differ in {len(strange)} tensors, for example {strange[0]}"
                )
            refuse_unbatchable(self._model, dtype=self._dtype, adapters=(self.with_all, [key, BASE]))
        except Exception as error:  # peft raises many types
            self._drop({key})
            raise EngineError(f"the adapter in {folder} can't be used: {error}") from error
        # peft's active adapter must not be one that is dropped. Activating it unfreezes it.
        self.with_all.set_adapter(key)
        self.with_all.requires_grad_(False)
        before = self.current.get(name)
        self.current[name] = Adapter(key, version)
        if before is not None:
            self._drop(set(self.with_all.peft_config) - {adapter.key for adapter in self.current.values()} - set(used))

    def of(self, rows: list[Adapter | None]) -> tuple[Any, list[str]] | None:
        """Return `DecodeBatch.adapters` for rows with these adapters."""
        if self.with_all is None:
            return None
        return self.with_all, [BASE if adapter is None else adapter.key for adapter in rows]

    def _drop(self, keys: set[str]) -> None:
        if self.with_all is None:
            return
        for key in keys & set(self.with_all.peft_config):
            if len(self.with_all.peft_config) == 1:
                self.with_all = None
                return
            self.with_all.delete_adapter(key)


def merged(model: Any, folder: Path, *, dtype: str) -> Any:
    """Merge a LoRA adapter into the weights of `model`, and return it. Raises the errors of `Adapters.load`."""
    adapters = Adapters(model, dtype=dtype)
    adapters.load("merged", folder, "")
    return adapters.with_all.merge_and_unload()


_SUPPORTED = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "lora_bias", "ensure_weight_tying", "qalora_group_size",
}  # fmt: skip
"""Settings of peft that change neither the model's own weights nor which tokens an adapter is applied to.

Others, also those of newer versions, are refused: peft ignores some (aLoRA's tokens) when rows share a batch.
"""

BASE = "__base__"
"""peft's name for rows without an adapter."""

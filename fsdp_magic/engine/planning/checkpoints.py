"""TRACER: ``from_pretrained`` reads a model's config and builds it; its weights stay in the file.

A checkpoint is as large as the model, and nothing of it matters but what the config says: shapes,
and the dtype that ``from_pretrained`` would load in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_MODELS = "transformers.modeling_utils"
_OF_LOADING = (
    "cache_dir", "ignore_mismatched_sizes", "force_download", "local_files_only", "token",
    "revision", "use_safetensors", "weights_only", "disable_mmap", "state_dict", "proxies",
    "tqdm_class", "output_loading_info", "_from_pipeline", "_from_auto", "torch_dtype",
    "device_map", "max_memory", "offload_folder", "offload_buffers", "subfolder", "_commit_hash",
    "variant", "adapter_kwargs", "adapter_name", "generation_config", "gguf_file",
    "distributed_config", "device_mesh", "tp_plan", "tp_size", "trust_remote_code", "use_kernels",
    "allow_all_kernels", "kernel_config", "key_mapping", "mirror", "low_cpu_mem_usage",
    "offload_state_dict", "fusion_config", "quantization_config", "_fast_init",
)  # fmt: skip
"""Keywords that are about files, and none of the config or of the model's constructor.

Source: ``from_pretrained`` in transformers/modeling_utils.py of transformers 5.24."""
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
"""Those of them that the config is found by."""


@contextmanager
def weights_stay_in_files() -> Iterator[None]:
    """Let ``from_pretrained`` build models from their configs inside."""
    finder = _AfterImport()
    if _MODELS in sys.modules:
        _replace(sys.modules[_MODELS])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes the module of transformers' models when the cell imports it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the genuine spec, with a loader that changes what it has loaded."""
        if fullname != _MODELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    module.PreTrainedModel.from_pretrained = classmethod(_from_config)


def _from_config(cls: Any, path: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Return a model as ``from_pretrained`` would, of weights that nobody has read."""
    if kwargs.get("quantization_config") is not None:
        raise NotImplementedError(
            "the planner knows no quantized weights; leave quantization_config out"
        )
    asked = kwargs.pop("dtype", None) or kwargs.get("torch_dtype") or "auto"
    files = {name: kwargs[name] for name in _OF_FILES if name in kwargs}
    loading_info = kwargs.get("output_loading_info", False)
    rest = {name: value for name, value in kwargs.items() if name not in _OF_LOADING}
    if config is None or isinstance(config, str | Path):
        config, rest = cls.config_class.from_pretrained(
            config or path, return_unused_kwargs=True, **files, **rest
        )
    attention = rest.pop("attn_implementation", None)
    if attention is not None:
        config._attn_implementation = attention
    model = cls._from_config(config, *args, dtype=_dtype(asked, config), **rest)
    model.eval()
    return (model, {}) if loading_info else model


def _dtype(asked: Any, config: Any) -> torch.dtype:
    """Return the dtype that weights are loaded in.

    Where the config says none it is that of the file, which is taken for the default dtype.
    """
    if isinstance(asked, torch.dtype):
        return asked
    found = getattr(config, "dtype", None) if asked == "auto" else asked
    if isinstance(found, str):
        found = getattr(torch, found)
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()

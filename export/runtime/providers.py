"""ONNX Runtime's execution providers by short names, and which of a graph's nodes they take.

`cpu` is always there. Others are built into the installed package (CUDA, CoreML, XNNPACK, ...) or are plugins, packages
of their own that load into it: modules `onnxruntime_ep_<name>` with `get_library_path` and `get_ep_names`
(https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/). What a provider does not take, the CPU
provider runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import onnxruntime as ort

from sportsllm.errors import ResourceError, UsageError

_SUFFIX = "ExecutionProvider"
_PLUGIN_PREFIX = "onnxruntime_ep_"
CPU_NAME = "CPUExecutionProvider"
# What to install for providers that are not there, by short name.
PACKAGES = {
    "cuda": "onnxruntime-gpu[cuda,cudnn] in place of onnxruntime",
    "tensorrt": "onnxruntime-gpu in place of onnxruntime, and TensorRT",
    "nvtensorrtrtx": "onnxruntime-ep-nv-tensorrt-rtx",
    "openvino": "onnxruntime-ep-openvino, or onnxruntime-openvino in place of onnxruntime",
    "webgpu": "onnxruntime-ep-webgpu",
    "dml": "onnxruntime-directml in place of onnxruntime",
    "coreml": "onnxruntime on macOS, which has it built in",
    "xnnpack": "a build of onnxruntime with it",
}
_ON_GPU = ("cuda", "tensorrt", "nvtensorrtrtx", "dml", "webgpu", "migraphx", "rocm")
_LONGEST = 240  # characters of an error
_ASSIGNMENT = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True)
class Provider:
    """What runs a graph beside, or instead of, the CPU provider.

    Attributes:
        name: as it was asked for, for example `cuda` or `openvino:gpu`.
        registered: ONNX Runtime's name for it.
        processor: what it runs on: `cpu`, `gpu` or `npu`.
        options: its settings.
        devices: those of a plugin that it gets; empty for one that is built in.
    """

    name: str
    registered: str
    processor: str
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether it is ONNX Runtime's own for CPUs, which takes every node."""
        return self.registered == CPU_NAME


CPU = Provider("cpu", CPU_NAME, "cpu")


@dataclass(frozen=True)
class Placement:
    """Where a graph's nodes run.

    Attributes:
        provider: which was asked for.
        taken: nodes that it takes, by operator.
        elsewhere: those that run on the CPU provider, by operator.
    """

    provider: Provider
    taken: Mapping[str, int]
    elsewhere: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = {name: getattr(self.provider, name) for name in ("name", "registered", "processor")}
        return {**found, "nodes": sum(self.taken.values()), "nodes_on_cpu": dict(self.elsewhere)}

    def __str__(self) -> str:
        where = f"provider: {self.provider.name} ({self.provider.registered}, on the {self.provider.processor.upper()})"
        taken, others = sum(self.taken.values()), sum(self.elsewhere.values())
        if not others:
            return f"{where} runs all {taken} nodes"
        words = ", ".join(f"{count} {op}" for op, count in Counter(self.elsewhere).most_common())
        return f"{where} runs {taken} of {taken + others} nodes; {others} fell to the CPU provider: {words}"


def short_name(registered: str) -> str:
    """`cuda` for `CUDAExecutionProvider`."""
    return registered.removesuffix(_SUFFIX).lower()


def find_provider(wanted: str) -> Provider:
    """The installed provider of a name.

    Args:
        wanted: a short name or ONNX Runtime's, in any case, with or without hyphens; `NAME:DEVICE` chooses one of its
            devices: a number, or `cpu`, `gpu` or `npu`.

    Raises:
        UsageError: no provider has that name.
        ResourceError: it is not installed, or finds no device here.
    """
    asked, _, device = wanted.partition(":")
    name = asked.lower().replace("-", "").replace("_", "").removesuffix(_SUFFIX.lower())
    if name == "cpu":
        if device:
            raise UsageError(f"--provider {wanted}: cpu has no devices to choose among; use --provider cpu")
        return CPU
    name = {"tensorrtrtx": "nvtensorrtrtx", "directml": "dml"}.get(name, name)
    built_in = {short_name(each): each for each in ort.get_available_providers()}
    if name in built_in:
        return _built_in(name, built_in[name], device)
    plugins = _plugins()
    if name in plugins:
        return _plugin(wanted, *plugins[name], device)
    here = ", ".join(installed())
    if name in PACKAGES:
        raise ResourceError(f"--provider {wanted}: not installed; installed: {here}; install {PACKAGES[name]}")
    others = "; ".join(f"{each}: {package}" for each, package in PACKAGES.items() if each not in installed())
    raise UsageError(f"--provider {wanted}: no provider has this name; installed: {here}; to install others, {others}")


def installed() -> list[str]:
    """Short names of the providers that are here, the CPU's first; without Azure's, which calls servers."""
    names = dict.fromkeys(["cpu", *map(short_name, ort.get_available_providers()), *_plugins()])
    return [name for name in names if name != "azure"]


def _built_in(name: str, registered: str, device: str) -> Provider:
    options, processor = {}, "gpu" if name in _ON_GPU else "cpu"
    if device.isdigit():
        options["device_id"] = device
    elif device and name != "openvino":
        raise UsageError(f"--provider {name}:{device}: give the number of a device, such as {name}:0")
    elif device:
        options["device_type"], processor = device.upper(), device.lower()
    if name == "cuda" and hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()  # CUDA's libraries where pip has installed them
    return Provider(f"{name}:{device}" if device else name, registered, processor, options)


@functools.cache
def _plugins() -> dict[str, tuple[str, ModuleType]]:
    """ONNX Runtime's name and the module of each installed plugin, by short name."""
    found = dict[str, tuple[str, ModuleType]]()
    for module in pkgutil.iter_modules():
        if module.name.startswith(_PLUGIN_PREFIX):
            try:
                plugin = importlib.import_module(module.name)
                found |= {short_name(name): (name, plugin) for name in plugin.get_ep_names()}
            except Exception as error:  # whatever a package of somebody else's raises
                from sportsllm.console import log  # loads rich, which would count in a measured process's memory

                log(f"{module.name.replace('_', '-')} is installed and cannot be imported: {one_line(error)}")
    return found


@functools.cache
def _register(library: str, name: str) -> None:
    """Load a plugin's library; it stays loaded."""
    ort.register_execution_provider_library(name, library)


def _plugin(wanted: str, registered: str, module: ModuleType, device: str) -> Provider:
    package = module.__name__.replace("_", "-")
    try:
        _register(module.get_library_path(), module.__name__)
    except Exception as error:  # the runtime's errors have no common class
        raise ResourceError(f"--provider {wanted}: {package} cannot be loaded: {one_line(error)}") from None
    found = [each for each in ort.get_ep_devices() if each.ep_name == registered]
    if not found:
        raise ResourceError(
            f"--provider {wanted}: {package} is installed but finds no processor here that it supports; "
            "use --provider cpu"
        )
    kinds = [each.device.type.name.lower() for each in found]
    if device.isdigit() and int(device) < len(found):
        chosen = int(device)
    elif device.lower() in kinds or not device:
        chosen = kinds.index(device.lower()) if device else 0
    else:
        choices = ", ".join(f"{place} ({kind})" for place, kind in enumerate(kinds))
        raise UsageError(f"--provider {wanted}: no such device; {short_name(registered)} has {choices}")
    return Provider(wanted.lower(), registered, kinds[chosen], {}, (found[chosen],))


def create_session(model: str | bytes, options: ort.SessionOptions, provider: Provider) -> ort.InferenceSession:
    """A session of a graph's file or bytes.

    Raises:
        ResourceError: the provider does not start here, or takes no node of the graph.
        the runtime's own errors: the graph cannot be loaded.
    """
    if provider.is_cpu:
        return ort.InferenceSession(model, options, providers=[CPU_NAME])
    options.add_session_config_entry(_ASSIGNMENT, "1")
    settings = dict(provider.options)
    if provider.registered == "OpenVINOExecutionProvider" and options.intra_op_num_threads and not provider.devices:
        settings["num_of_threads"] = str(options.intra_op_num_threads)  # it has threads of its own
    given: dict[str, Any] = {"providers": [(provider.registered, settings), CPU_NAME]}
    try:
        if provider.devices:
            options.add_provider_for_devices(list(provider.devices), settings)
            given = {}
        # Without this a provider that fails is replaced by the CPU's.
        session = ort.InferenceSession(model, options, enable_fallback=0, **given)
    except Exception as error:  # as above
        raise ResourceError(
            f"--provider {provider.name}: cannot run this graph here ({one_line(error)}); use --provider cpu"
        ) from None
    if provider.registered not in session.get_providers():
        raise ResourceError(
            f"--provider {provider.name}: ONNX Runtime has not started it (a library or driver that it needs is "
            "missing); use --provider cpu"
        )
    if not placement(session, provider).taken:
        raise ResourceError(f"--provider {provider.name}: takes none of the graph's nodes; use --provider cpu")
    return session


def placement(session: ort.InferenceSession, provider: Provider) -> Placement:
    """Where the nodes of a session run that `create_session` made."""
    taken, elsewhere = Counter[str](), Counter[str]()
    for part in session.get_provider_graph_assignment_info():
        (taken if part.ep_name == provider.registered else elsewhere).update(node.op_type for node in part.get_nodes())
    return Placement(provider, dict(taken), dict(elsewhere))


def one_line(error: Exception) -> str:
    """The runtime's error, shortened to its end: it begins with source files and signatures."""
    text = " ".join(str(error).split()).rpartition("[ONNXRuntimeError]")[2].lstrip(" :0123456789")
    return text if len(text) <= _LONGEST else f"... {text[-_LONGEST:]}"

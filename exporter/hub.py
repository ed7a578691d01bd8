"""Find a checkpoint: a local folder, or a model on the Hugging Face hub, in its cache.

Of a model on the hub the small files come first, so that what they say can be refused before hours
of downloading; the weights follow, of the same commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import CONFIG_FILE
from onnxport.exporter.embedding import (
    LENGTH_FILE,
    MODULES_FILE,
    POOLING_FILES,
    PROMPTS_FILE,
    SCORE_FILES,
)
from onnxport.exporter.gguf.parts import SUFFIX, is_gguf
from onnxport.exporter.source import TEMPLATE_FOLDER, TOKENIZER_FILES

_SMALL_FILES: Final = [
    *(CONFIG_FILE, *TOKENIZER_FILES, f"{TEMPLATE_FOLDER}/*.jinja"),
    *(MODULES_FILE, POOLING_FILES, SCORE_FILES, PROMPTS_FILE, LENGTH_FILE),
]
_WEIGHTS: Final = [
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors-*-of-*.safetensors",
    "pytorch_model-*-of-*.safetensors",
    "model.safetensors.index.json",
]
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint on this machine; of one of the hub's, the weights may be missing yet."""

    path: Path  # of the folder, or of a GGUF file
    name: str  # hub id, or the folder's or file's name
    revision: str | None  # commit on the hub; None where it is local


def find_checkpoint(
    source: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> CheckpointFolder:
    """Resolve `source`; what exists locally is never looked up on the hub.

    Of a hub id all but the weights is downloaded, which `fetch_weights` does.

    Args:
        source: A folder, a GGUF file, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
        revision: Branch, tag or commit on the hub; None: the default branch.
        token: Hub token; None: the one that is logged in, if any.

    Raises:
        CheckpointError: Neither a folder nor a file nor a hub id, or the hub cannot give it: no
            such model or revision, gated, without a configuration, or unreachable and not in the
            cache.
    """
    path = Path(source)
    if path.is_dir():
        return CheckpointFolder(path, path.resolve().name, None)
    if is_gguf(path):
        return CheckpointFolder(path, path.stem, None)
    is_path = str(source).startswith(".")  # ./model, ../model
    if path.suffix.lower() == SUFFIX and not path.exists():
        raise CheckpointError(f"there is no file {source}; check the path of the GGUF file.")
    if path.exists() or is_path or not _HUB_ID.fullmatch(str(source)):
        raise _neither(source)
    found = _download(str(source), revision, token, _SMALL_FILES)
    if not (found / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"the hub's {source} has no {CONFIG_FILE}, so no checkpoint that can be read from "
            f"there. Of GGUF files download one (`hf download {source} FILE{SUFFIX}`), and give "
            "its path."
        )
    return CheckpointFolder(found, str(source), found.name)


def fetch_weights(folder: CheckpointFolder, *, token: str | bool | None = None) -> CheckpointFolder:
    """Download the weights that belong to what `find_checkpoint` found; a local folder has them.

    Raises:
        CheckpointError: The hub cannot give them.
    """
    if folder.revision is None:
        return folder
    return replace(folder, path=_download(folder.name, folder.revision, token, _WEIGHTS))


def _neither(source: str | Path) -> CheckpointError:
    return CheckpointError(
        f"{source} is neither a folder nor a hub id (owner/name), nor a GGUF file. Give a folder "
        f"with {CONFIG_FILE} and safetensors weights, a file whose name ends in {SUFFIX}, or an id "
        "such as Qwen/Qwen2.5-0.5B-Instruct; files are not chosen by OWNER/NAME:TYPE."
    )


def _download(
    hub_id: str, revision: str | None, token: str | bool | None, patterns: list[str]
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        return Path(
            snapshot_download(hub_id, revision=revision, token=token, allow_patterns=patterns)
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
            f"{where} is not, or not all of it, in the local cache and the hub cannot be reached. "
            "Connect to the network, or give a local folder."
        ) from error
    except HFValidationError as error:
        raise _neither(hub_id) from error
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"the hub's token has characters that no token has: {error}. Copy it again."
        ) from error
    except Exception as error:  # those of its HTTP client are no OSError, and some have no class
        reason = " ".join((type(error).__name__ + ":", *str(error).split())).removesuffix(":")
        raise CheckpointError(
            f"{where} cannot be downloaded from the hub: {reason}. Try again, which goes on where "
            "it ended, or give a local folder."
        ) from error

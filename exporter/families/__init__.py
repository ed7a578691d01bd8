"""Model families: one file each, and one line here."""

from __future__ import annotations

import re
from typing import Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families import (
    afmoe,
    apertus,
    arcee,
    axk1,
    bailing_moe,
    bamba,
    cohere,
    cohere2_moe,
    cwm,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    exaone,
    exaone4,
    falcon,
    falcon_h1,
    flex_olmo,
    gemma1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    granite_swa,
    helium,
    hunyuan,
    hy_v3,
    hyperclovax,
    internlm2,
    internlm3,
    iquestcoder,
    jais2,
    kimi_linear,
    laguna,
    lfm2,
    lfm3,
    llama,
    llama4,
    mellum,
    mimo,
    mimo_v2_flash,
    minicpm,
    minicpm3,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    orion,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    sarvam_mla,
    sarvam_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    vaultgemma,
    youtu,
)
from onnxport.exporter.families.base import Family

FAMILIES: Final[tuple[Family, ...]] = (
    afmoe.FAMILY,
    apertus.FAMILY,
    arcee.FAMILY,
    axk1.FAMILY,
    bailing_moe.FAMILY,
    bamba.FAMILY,
    cohere.FAMILY,
    cohere.WITH_WINDOWS,
    cohere2_moe.FAMILY,
    cwm.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    dots1.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5.WITH_EXPERTS,
    exaone.FAMILY,
    exaone4.FAMILY,
    exaone4.WITH_EXPERTS,
    falcon.FAMILY,
    falcon_h1.FAMILY,
    flex_olmo.FAMILY,
    gemma1.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma3.WITH_IMAGES,
    gemma3n.FAMILY,
    gemma3n.WITH_IMAGES,
    gemma4.FAMILY,
    gemma4.WITH_IMAGES,
    glm.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    gpt2.FAMILY,
    gpt_bigcode.FAMILY,
    gpt_neox.FAMILY,
    gpt_oss.FAMILY,
    gptj.FAMILY,
    granite.FAMILY,
    granite.WITH_EXPERTS,
    granite.WITH_SHARED_EXPERTS,
    granite_hybrid.FAMILY,
    granite_swa.FAMILY,
    granite_swa.WITH_EXPERTS,
    helium.FAMILY,
    hunyuan.FAMILY,
    hunyuan.WITH_EXPERTS,
    hyperclovax.FAMILY,
    hy_v3.FAMILY,
    internlm2.FAMILY,
    internlm3.FAMILY,
    iquestcoder.FAMILY,
    jais2.FAMILY,
    kimi_linear.FAMILY,
    laguna.FAMILY,
    lfm2.FAMILY,
    lfm2.WITH_EXPERTS,
    lfm3.FAMILY,
    llama.FAMILY,
    llama4.FAMILY,
    llama4.WITH_IMAGES,
    mellum.FAMILY,
    mimo.FAMILY,
    mimo_v2_flash.FAMILY,
    minicpm.FAMILY,
    minicpm3.FAMILY,
    minimax_m2.FAMILY,
    ministral.FAMILY,
    ministral3.FAMILY,
    mistral.FAMILY,
    mistral.WITH_IMAGES,
    mistral4.FAMILY,
    mixtral.FAMILY,
    nanochat.FAMILY,
    nemotron.FAMILY,
    nemotron_h.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    olmo_hybrid.FAMILY,
    olmoe.FAMILY,
    opt.FAMILY,
    orion.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    phimoe.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.WITH_IMAGES,
    qwen3_5.WITH_EXPERTS,
    qwen3_5.WITH_EXPERTS_AND_IMAGES,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    sarvam_mla.FAMILY,
    sarvam_moe.FAMILY,
    seed_oss.FAMILY,
    smollm3.FAMILY,
    solar_open.FAMILY,
    stablelm.FAMILY,
    starcoder2.FAMILY,
    vaultgemma.FAMILY,
    youtu.FAMILY,
)

# Classes of encoders, and of decoders that were made ones.
_ENCODERS: Final = re.compile(
    "bert|mpnet|electra|t5(enc|model|for)|bidirec|^llama(bi|enc)", re.IGNORECASE
)


def find_family(config: Config) -> Family:
    """The family of the architecture that `config` names.

    `architectures` decides; `model_type` where there is none, or where the class is another
    family's that computes this one too, or the one that files came with. Raises
    UnsupportedModelError, which lists the supported ones.
    """
    model_type = config.get("model_type", str, None)
    for family in FAMILIES:
        if family.computed_by in config.architectures and model_type == family.name:
            return family
    for family in FAMILIES:
        if {family.architecture, family.base, family.classifier} & {*config.architectures}:
            if model_type not in (None, family.name, *family.other_types):
                raise UnsupportedModelError(
                    f"{config.path} names the architecture {config.architectures[0]} and the "
                    f"model_type {model_type}, which is another model's; correct one of them."
                )
            return family
        if not config.architectures and model_type in (family.name, *family.other_types):
            return family
    found = ", ".join(config.architectures) or model_type or "no architecture"
    if _ENCODERS.search(found):
        raise UnsupportedModelError(
            f"{config.path} names {found}, in which tokens see those behind them; supported is "
            "causal attention."
        )
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModelError(
        f"{config.path} names {found}, which is not supported. Supported are: {supported}."
    )

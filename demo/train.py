"""Train a demo model and save it as a Hugging Face folder in bfloat16.

The model is the product; this program is its recipe. Every step draws fresh documents, computes
the loss on what an assistant says (and on all of a plain text), and near the end of the run the
forward pass sees int4 weights, so that the exported int4 artifact answers like the original. The
schedule follows the clock, so that a run ends in time however busy the machine is.

Usage, from the repository root:
    torchrun --nproc-per-node 2 -m demo.train model --minutes 40
    torchrun --nproc-per-node 2 -m demo.train draft --minutes 6 --teacher demo/model
"""

import argparse
import itertools
import math
import shutil
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from demo.corpus import documents
from demo.examples import NO_TARGET, Example, encode, micro_batches, render
from demo.quantize import int4_layers, straight_through_int4
from demo.tokenizer import (
    END_OF_TEXT,
    MAX_LENGTH,
    TOKENIZER_FILES,
    TURN_END,
    save_tokenizer,
    train_tokenizer,
)

HERE = Path(__file__).parent
SHAPES = {
    "model": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5,
              "num_attention_heads": 8, "num_key_value_heads": 2},
    "draft": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
HEAD_SIZE = 32
INT4_FROM = 0.75  # share of the run after which the forward pass sees int4 weights
INT4_EVERY = 4  # one step in this many still sees plain weights, so that both stay good
WARM_UP_STEPS = 40
LOG_EVERY = 50  # steps; the loss in the log is their mean
SAVE_MINUTES = 9
HELD_OUT_DOCUMENTS = 200
TOKENIZER_DOCUMENTS = 20000


def build_model(shape: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a randomly initialised Llama of one of the `SHAPES`, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        **SHAPES[shape],
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


def target_logits(
    model: LlamaForCausalLM, ids: Tensor, targets: Tensor, int4_head: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logits [num_targets, vocab] and token ids [num_targets] where there is a target."""
    head = straight_through_int4(model.lm_head.weight) if int4_head else model.lm_head.weight
    wanted = targets != NO_TARGET
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids, use_cache=False).last_hidden_state
        logits = linear(hidden[wanted], head)
    return logits.float(), targets[wanted]


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, examples: list[Example], int4: bool = False) -> float:
    """Return exp(mean loss) over the targets of `examples`."""
    loss, count = 0.0, 0
    weights = int4_layers(model.model) if int4 else nullcontext()
    with weights, torch.compiler.set_stance("force_eager"):  # not worth a compilation
        for ids, targets in micro_batches(examples):
            logits, wanted = target_logits(model, ids, targets, int4)
            loss += cross_entropy(logits, wanted, reduction="sum").item()
            count += len(wanted)
    return math.exp(loss / count)


def backward(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM | None,
    examples: list[Example],
    int4: bool,
) -> float:
    """Add the gradient of the mean loss over `examples`, and return that loss.

    With a `teacher` its distributions are the targets, else the documents' tokens.
    """
    count = sum(int((targets != NO_TARGET).sum()) for _, targets in examples)
    total = 0.0
    with int4_layers(model.model) if int4 else nullcontext():
        for ids, targets in micro_batches(examples):
            logits, goal = target_logits(model, ids, targets, int4)
            if teacher is not None:
                with torch.no_grad():
                    goal = target_logits(teacher, ids, targets)[0].softmax(-1)
            loss = cross_entropy(logits, goal, reduction="sum") / count
            loss.backward()
            total += loss.item()
    return total


def rank() -> int:
    """Return this worker's number; 0 reports and saves."""
    return dist.get_rank() if dist.is_initialized() else 0


def average(model: LlamaForCausalLM, progress: float) -> float:
    """Average the gradients and `progress` over all workers; return the average progress.

    Every worker then takes the same step at the same learning rate, so their weights stay equal.
    """
    if not dist.is_initialized():
        return progress
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([*(g.flatten() for g in gradients), torch.tensor([progress])])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = flat[:-1].split([g.numel() for g in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
    return flat[-1].item()


def train(model: LlamaForCausalLM, args: argparse.Namespace, checkpoint: "Checkpoint") -> None:
    """Run the recipe: Muon for the layers' matrices, AdamW for the rest, linear decay to 0."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    teacher = LlamaForCausalLM.from_pretrained(args.teacher).eval() if args.teacher else None
    source = documents(seed=args.seed + rank())
    if rank() == 0:
        checkpoint.log(f"{args.shape}: {model.num_parameters()} parameters, {args.minutes} minutes")
    start, saved, step, tokens, progress = time.monotonic(), 0.0, 0, 0, 0.0
    losses: deque[float] = deque(maxlen=LOG_EVERY)
    while progress < 1:
        step += 1
        for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
            group["lr"] = args.lr * min(step / WARM_UP_STEPS, 1 - progress)
        examples = encode(list(itertools.islice(source, args.batch)), checkpoint.tokenizer)
        tokens += sum(len(ids) for ids, _ in examples)
        int4 = progress > INT4_FROM and step % INT4_EVERY != 0
        losses.append(backward(model, teacher, examples, int4))
        minutes = (time.monotonic() - start) / 60
        progress = average(model, minutes / args.minutes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if rank() != 0:
            continue
        if step % LOG_EVERY == 0:
            loss, lr = sum(losses) / len(losses), optimizers[0].param_groups[0]["lr"]
            checkpoint.log(
                f"step {step} loss {loss:.4f} lr {lr:.2e} tokens {tokens} minutes {minutes:.1f}"
            )
        if minutes - saved > SAVE_MINUTES or progress >= 1:
            checkpoint.save(model)
            saved = minutes


class Checkpoint:
    """Writes the model folder, and the log line that says how good it is."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        held_out = itertools.islice(documents(seed=0, held_out=True), HELD_OUT_DOCUMENTS)
        self.held_out = encode(list(held_out), self.tokenizer)
        self._log = log

    def log(self, line: str) -> None:
        """Print `line` and append it to the log."""
        print(line, flush=True)
        with self._log.open("a") as file:
            file.write(line + "\n")

    def save(self, model: LlamaForCausalLM) -> None:
        """Measure `model` on the held-out split, and write it in bfloat16."""
        plain = perplexity(model, self.held_out)
        int4 = perplexity(model, self.held_out, int4=True)
        self.log(f"held-out perplexity {plain:.4f}, with int4 weights {int4:.4f}")
        weights = {name: p.to(torch.bfloat16) for name, p in model.state_dict().items()}
        model.generation_config = GenerationConfig(
            eos_token_id=[
                self.tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)
            ],
            pad_token_id=self.tokenizer.pad_token_id,
            do_sample=False,
        )
        config = LlamaConfig.from_dict(model.config.to_dict() | {"dtype": "bfloat16"})
        copy = LlamaForCausalLM(config).to(torch.bfloat16)
        copy.load_state_dict(weights)
        copy.generation_config = model.generation_config
        copy.save_pretrained(self.folder)


def prepare_tokenizer(folder: Path, teacher: Path | None) -> None:
    """Put a tokenizer into `folder` if it has none: the teacher's, or a newly trained one."""
    if (folder / "tokenizer.json").exists():
        return
    if teacher is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            shutil.copy(teacher / name, folder / name)
        return
    template = (HERE / "chat_template.jinja").read_text()
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=template)
    sample = list(itertools.islice(documents(seed=0), TOKENIZER_DOCUMENTS))
    save_tokenizer(train_tokenizer(render(sample, renderer)), template, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a demo model.")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--batch", type=int, default=20, help="documents per step and worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--teacher", type=Path, help="model folder whose predictions to learn")
    parser.add_argument("--init", type=Path, help="model folder to continue from")
    parser.add_argument("--output", type=Path, help="default: the folder demo/SHAPE")
    parser.add_argument("--log-file", type=Path, default=HERE / "training.log")
    args = parser.parse_args()
    folder = args.output or HERE / args.shape
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    if rank() == 0:
        prepare_tokenizer(folder, args.teacher)
    if dist.is_initialized():
        dist.barrier()
    checkpoint = Checkpoint(folder, args.log_file)
    model = build_model(args.shape, checkpoint.tokenizer)
    if args.init:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(args.init).float().state_dict())
    model.model.compile(dynamic=True)  # fuses what would otherwise be half of the time
    train(model, args, checkpoint)


if __name__ == "__main__":
    main()

"""Train an EAGLE-3 head for a demo model, and save it as its authors publish such heads.

It learns the model's own distributions over the corpus, at each place of a draft, for a clock's
time, as `demo.train` does. Held out, it tells how many guesses are right where those before are.

Usage, from the repository root:
    torchrun --nproc-per-node 2 -m demo.train_eagle --minutes 20
"""

import argparse
import itertools
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import documents
from demo.eagle import LAYERS, Head, drafts, states_and_logits
from demo.examples import NO_TARGET, Example, encode, micro_batches
from demo.train import HELD_OUT_DOCUMENTS, HERE, LOG_EVERY, WARM_UP_STEPS, average, rank

PLACES = 4  # of a draft, in training
FADING = 0.8  # what a place counts, beside the one before
LOGITS = 1024
COUNTED_DOCUMENTS = 4000


def commonest_tokens(tokenizer: PreTrainedTokenizerFast, count: int) -> Tensor:
    """Return the tokens that the model is to say most often, int64 [count], ascending."""
    counts: Counter[int] = Counter(range(len(tokenizer)))  # so that there are enough of them
    sample = list(itertools.islice(documents(seed=0), COUNTED_DOCUMENTS))
    for _, targets in encode(sample, tokenizer):
        counts.update(targets[targets != NO_TARGET].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def backward(model: LlamaForCausalLM, head: Head, examples: list[Example]) -> float:
    """Add the gradient of the mean loss over `examples`, and return that loss at the first place.

    The loss is cross entropy with the model's distribution over the tokens that have a logit, where
    the likeliest token of all is one of them.
    """
    count = sum(int((targets[1:] != NO_TARGET).sum()) for _, targets in examples)
    first = 0.0
    for ids, targets in micro_batches(examples):
        states, logits = states_and_logits(model, ids, head.layers)
        logits = logits[:, 1:]
        wanted = (targets[:, 1:] != NO_TARGET) & torch.isin(logits.argmax(-1), head.tokens)
        goal = logits[..., head.tokens].softmax(-1)
        total = torch.zeros(())
        for place, guessed in enumerate(drafts(model, head, ids, states, PLACES)):
            here = wanted.clone()
            here[:, :place] = False
            loss = -(goal[here] * guessed[here].log_softmax(-1)).sum() / count
            total = total + FADING**place * loss
            first += loss.item() if not place else 0.0
        total.backward()
    return first


@torch.no_grad()
def acceptance(model: LlamaForCausalLM, head: Head, examples: list[Example]) -> list[float]:
    """Return the share of greedy guesses at each place that are the model's likeliest token.

    Only drafts count whose guesses before are right, and whose tokens the document has as well.
    """
    right, tried = [0] * PLACES, [0] * PLACES
    for ids, targets in micro_batches(examples):
        states, logits = states_and_logits(model, ids, head.layers)
        said = logits[:, 1:].argmax(-1)
        spoken = targets[:, 1:] != NO_TARGET
        follows = torch.cat([said[:, :-1] == ids[:, 2:], torch.zeros_like(said[:, :1]).bool()], 1)
        open_drafts = spoken
        for place, guessed in enumerate(drafts(model, head, ids, states, PLACES)):
            found = head.tokens[guessed.argmax(-1)]
            agrees = open_drafts & (found == said)
            tried[place] += int(open_drafts.sum())
            right[place] += int(agrees.sum())
            open_drafts = (agrees & follows).roll(1, 1) & spoken
            open_drafts[:, 0] = False
    return [here / max(1, all_of_them) for here, all_of_them in zip(right, tried, strict=True)]


def train(
    model: LlamaForCausalLM,
    head: Head,
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
    log: "Log",
) -> None:
    """Run the recipe: Muon for the layer's matrices, AdamW for the rest, linear decay to 0."""
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name]
    others = [p for name, p in head.named_parameters() if p.ndim == 1 or "lm_head" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    source = documents(seed=args.seed + rank())
    start, step, tokens, progress, losses = time.monotonic(), 0, 0, 0.0, 0.0
    while progress < 1:
        step += 1
        for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
            group["lr"] = args.lr * min(step / WARM_UP_STEPS, 1 - progress)
        examples = encode(list(itertools.islice(source, args.batch)), tokenizer)
        tokens += sum(len(ids) for ids, _ in examples)
        losses += backward(model, head, examples)
        minutes = (time.monotonic() - start) / 60
        progress = average(head, minutes / args.minutes)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            mean = losses / LOG_EVERY
            log(f"step {step} loss {mean:.4f} tokens {tokens} minutes {minutes:.1f}")
            losses = 0.0


class Log:
    """Prints lines, and appends them to a file, in one worker."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, line: str) -> None:
        """Tell a line, without its end."""
        if rank() == 0:
            print(line, flush=True)
            with self._file.open("a") as file:
                file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--batch", type=int, default=20, help="documents per step and worker")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="that it reads")
    parser.add_argument("--output", type=Path, default=HERE / "eagle")
    parser.add_argument("--log-file", type=Path, default=HERE / "training.log")
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.requires_grad_(requires_grad=False)
    count = model.config.num_hidden_layers
    if args.layers != sorted(set(args.layers)) or not all(0 < n < count for n in args.layers):
        parser.error(f"--layers is {args.layers}; give some of 1 to {count - 1}, ascending")
    head = Head(model.config, commonest_tokens(tokenizer, LOGITS), args.layers)
    log = Log(args.log_file)
    count = sum(p.numel() for p in head.parameters())
    log(f"eagle: {count} parameters, layers {args.layers}, {args.minutes} minutes")
    train(model, head, tokenizer, args, log)
    if rank() == 0:
        head.save(args.output)
        held_out = itertools.islice(documents(seed=0, held_out=True), HELD_OUT_DOCUMENTS)
        shares = acceptance(model, Head.load(args.output), encode(list(held_out), tokenizer))
        log("held-out guesses right by place: " + ", ".join(f"{one:.1%}" for one in shares))


if __name__ == "__main__":
    main()

"""Documents as next-token examples: ids, and targets where the model is to speak."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from demo.corpus import Document
from demo.tokenizer import END_OF_TEXT, MAX_LENGTH, TURN_END, TURN_START

MICRO_BATCHES = 3
NO_TARGET = -100  # what torch's cross entropy ignores
Example = tuple[Tensor, Tensor]  # ids and targets, both int64 [length]


def render(batch: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the text of each document, dialogues as the chat template writes them."""
    return [
        document.text
        or tokenizer.apply_chat_template(document.messages, tools=document.tools, tokenize=False)
        for document in batch
    ]


def encode(batch: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    """Return next-token examples; in a dialogue only the assistant's tokens are targets."""
    end_of_text = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    examples = []
    rows = tokenizer(render(batch, tokenizer))["input_ids"]
    for document, row in zip(batch, rows, strict=True):
        if document.text is not None:
            row = [end_of_text, *row, end_of_text]
        ids = torch.tensor(row[:MAX_LENGTH])
        spoken = torch.ones_like(ids).bool() if document.text else said_by_assistant(ids, tokenizer)
        targets = torch.where(spoken, ids, NO_TARGET)
        examples.append((ids[:-1], targets[1:]))
    return examples


def said_by_assistant(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return a mask [length] of the tokens an assistant produces, its <|im_end|> included."""
    start, end = tokenizer.convert_tokens_to_ids([TURN_START, TURN_END])
    (assistant,) = tokenizer.encode("assistant")
    mask = torch.zeros_like(ids).bool()
    ends = (ids == end).nonzero().flatten()
    for begin in (ids == start).nonzero().flatten():
        if ids[begin + 1] == assistant:
            stop = ends[ends > begin][0] if (ends > begin).any() else len(ids)
            mask[begin + 3 : stop + 1] = True  # after <|im_start|>, "assistant" and the new line
    return mask


def micro_batches(examples: list[Example]) -> Iterator[Example]:
    """Yield padded [rows, length] batches of examples of similar length.

    Padding is on the right: with causal attention no mask is needed.
    """
    examples = sorted(examples, key=lambda example: len(example[0]))
    total, rows, tokens = sum(len(ids) for ids, _ in examples), [], 0
    for ids, targets in examples:
        rows.append((ids, targets))
        tokens += len(ids)
        if tokens >= total / MICRO_BATCHES:
            yield _pad(rows)
            rows, tokens = [], 0
    if rows:
        yield _pad(rows)


def _pad(rows: list[Example]) -> Example:
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    targets = [targets for _, targets in rows]
    return ids, pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)

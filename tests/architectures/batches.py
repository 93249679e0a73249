"""What a step of training is given, of a batch size and a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, N_LABELS = 64, 3
PICTURE = 5  # the token in whose place a picture is seen
Batch = Callable[[int, int], dict[str, Any]]


def text(batch: int, length: int) -> dict[str, Any]:
    """A padded batch whose every token is predicted."""
    ids = torch.randint(3, VOCABULARY, (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole_text(batch: int, length: int) -> dict[str, Any]:
    """Without padding, for those that take none."""
    return {k: v for k, v in text(batch, length).items() if k != "attention_mask"} | {
        "labels": torch.randint(3, VOCABULARY, (batch, length))
    }


def sentences(batch: int, length: int) -> dict[str, Any]:
    """A padded batch, a class for each row."""
    return {**text(batch, length), "labels": torch.randint(N_LABELS, (batch,))}


def questions(batch: int, length: int) -> dict[str, Any]:
    """A padded batch, and where the answers are."""
    given = {k: v for k, v in text(batch, length).items() if k != "labels"}
    return {
        **given,
        "start_positions": torch.randint(length, (batch,)),
        "end_positions": torch.randint(length, (batch,)),
    }


def images(batch: int, _length: int) -> dict[str, Any]:
    """Pictures, a class for each."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(N_LABELS, (batch,))}


def large_images(batch: int, _length: int) -> dict[str, Any]:
    """Larger ones: statistics of a batch need more than a few elements to be more than rounding."""
    return {"pixel_values": torch.randn(batch, 3, 128, 128), "labels": torch.randint(N_LABELS, (batch,))}


def segments(batch: int, _length: int) -> dict[str, Any]:
    """Pictures, a class for each pixel."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(N_LABELS, (batch, 32, 32))}


def pairs(batch: int, length: int) -> dict[str, Any]:
    """Pictures and their captions."""
    ids = text(batch, length)["input_ids"]
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32), "return_loss": True}


def captions(batch: int, length: int) -> dict[str, Any]:
    """Pictures and what is said of them, every token predicted."""
    ids = torch.randint(3, VOCABULARY, (batch, length))
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "input_ids": ids, "labels": ids}


def answers(batch: int, length: int) -> dict[str, Any]:
    """Pictures and questions, a score for each answer."""
    given = {k: v for k, v in text(batch, length).items() if k != "labels"}
    return {**given, "pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.rand(batch, N_LABELS)}


def among_text(n: int) -> Batch:
    """A picture in each row, which takes the place of `n` of its tokens."""

    def seen(batch: int, length: int) -> dict[str, Any]:
        given = text(batch, length + n)
        given["input_ids"] = given["input_ids"].clamp(min=PICTURE + 1)
        given["input_ids"][:, 1 : 1 + n] = PICTURE
        return {**given, "pixel_values": torch.randn(batch, 3, 32, 32)}

    return seen


def one_of_several_pictures(batch: int, length: int) -> dict[str, Any]:
    """The same, where a row may have more than one."""
    given = among_text(4)(batch, length)
    return {**given, "pixel_values": given["pixel_values"][:, None]}


def patches(batch: int, length: int) -> dict[str, Any]:
    """Pictures as patches, each picture with how many there are."""
    given = {k: v for k, v in among_text(4)(batch, length).items() if k != "pixel_values"}
    return {
        **given,
        "pixel_values": torch.randn(batch * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
        "mm_token_type_ids": (given["input_ids"] == PICTURE).long(),
    }


def unlabelled_images(batch: int, _length: int) -> dict[str, Any]:
    """Pictures alone."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def videos(batch: int, _length: int) -> dict[str, Any]:
    """Films, a class for each."""
    return {"pixel_values": torch.randn(batch, 4, 3, 32, 32), "labels": torch.randint(N_LABELS, (batch,))}


def pages(batch: int, length: int) -> dict[str, Any]:
    """Words with their places on a page, a class for each."""
    boxes = torch.randint(30, (batch, length, 4))
    boxes[..., 2:] += boxes[..., :2]
    return {**text(batch, length), "bbox": boxes, "labels": torch.randint(N_LABELS, (batch, length))}


def series(batch: int, _length: int) -> dict[str, Any]:
    """Two series over time, and how they go on."""
    return {"past_values": torch.randn(batch, 32, 2), "future_values": torch.randn(batch, 8, 2)}


def bytes_(batch: int, _length: int) -> dict[str, Any]:
    """So many tokens as there are places."""
    return {
        "inputs": torch.randint(3, VOCABULARY, (batch, 16)),
        "labels": torch.randint(3, VOCABULARY, (batch, 16)),
    }


def waves(batch: int, length: int) -> dict[str, Any]:
    """Sound, a class for each row."""
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(N_LABELS, (batch,))}


def speech(batch: int, length: int) -> dict[str, Any]:
    """Sound, and what is said."""
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(1, VOCABULARY, (batch, 4))}


def spectrograms(batch: int, _length: int) -> dict[str, Any]:
    """Spectra over time, a class for each row."""
    return {"input_values": torch.randn(batch, 64, 16), "labels": torch.randint(N_LABELS, (batch,))}


def spectra(batch: int, length: int) -> dict[str, Any]:
    """The same with time first."""
    given = spoken(batch, length)
    return {**given, "input_features": given["input_features"].mT}


def spoken(batch: int, length: int) -> dict[str, Any]:
    """Spectra over time, and what is said."""
    return {
        "input_features": torch.randn(batch, 16, 40),
        "labels": torch.randint(3, VOCABULARY, (batch, length)),
    }

"""What reading from the Hugging Face hub has in common: its library's retries, and whether it could be reached."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

TRANSPORT_ERROR = "TransportError"  # of httpx and of its successors: no connection, a timeout, a proxy that refuses


def silence_retries() -> None:
    """The library says two lines for each of its tries; what comes of them is said in the end."""
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def is_unreachable(error: BaseException) -> bool:
    """Whether an error of the library, or what caused it, is a failed connection; an answer such as 404 is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionError, TimeoutError)):
            return True
        if any(kind.__name__ == TRANSPORT_ERROR for kind in type(cause).__mro__):
            return True
        cause = cause.__cause__
    return False


@contextmanager
def offline(is_down: bool) -> Iterator[None]:
    """Inside the block `datasets` reads its cache without asking the hub, where that is known to be down."""
    import datasets  # noqa: PLC0415

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or is_down
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before

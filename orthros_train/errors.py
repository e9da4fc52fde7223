"""The error that every command turns into one clear line and exit code 2."""


class InputError(Exception):
    """The user's input is wrong; the message says what, where, and the remedy in one line."""


def damaged_model_errors() -> tuple[type[Exception], ...]:
    """What transformers, safetensors and torch raise for a model folder with impossible values or broken files."""
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415  slow to import
    from safetensors import SafetensorError  # noqa: PLC0415

    broken_values = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
    return (OSError, RuntimeError, *broken_values, StrictDataclassError, SafetensorError)

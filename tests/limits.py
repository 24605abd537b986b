"""The time limit of everything that a test starts and waits for."""

HANG_SECONDS = (
    1800  # guards against hanging, and measures no speed: a busy machine takes many times as long
)

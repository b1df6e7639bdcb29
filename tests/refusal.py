"""Import privgrad as on Windows; fail unless this is refused with the remedy. `make windows` runs it, there and here.

It needs no other package: the refusal is before all other imports.
"""

import sys

sys.platform = "win32"
try:
    import privgrad
except ImportError as error:
    message = str(error)
else:
    sys.exit(f"{privgrad.__file__} was imported")
print(message)  # noqa: T201
if "WSL" not in message or "torch" in sys.modules:
    sys.exit("expected the remedy, before torch is imported")

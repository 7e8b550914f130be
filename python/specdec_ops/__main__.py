"""``python -m specdec_ops`` prints what this installation has."""

from specdec_ops.config import show_config

print(show_config())

"""``python -m specdec_ops`` prints what this installation has, and with ``vllm`` what it replaces there."""

import argparse

from specdec_ops.config import show_config

parser = argparse.ArgumentParser(prog="python -m specdec_ops", description=__doc__)
parser.add_argument("subject", nargs="?", choices=["config", "vllm"], default="config")
if parser.parse_args().subject == "vllm":
    from specdec_ops.integrations import vllm

    print(vllm.describe())
else:
    print(show_config())

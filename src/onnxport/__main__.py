"""`python -m onnxport`, the same as the `onnxport` command."""

import sys

from onnxport.cli import main

if __name__ == "__main__":
    sys.exit(main())

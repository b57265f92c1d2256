"""Prints pip's option for the index of PyTorch's CPU builds when it can be reached, else nothing.

The CPU build is a tenth of the default one's size. Where that index is out of reach (an own mirror, no
network), pip's configured indexes decide; asking an unreachable one for every package would take minutes.
"""

import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"

if __name__ == "__main__":
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=3) as answer:
            is_there = answer.status == 200
    except OSError:
        is_there = False
    print(f"--extra-index-url {INDEX}" if is_there else "")

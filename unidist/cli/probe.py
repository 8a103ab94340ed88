"""``python -m unidist.cli.probe``: one rank of a world that the doctor tries."""

import torch

import unidist

if __name__ == "__main__":
    unidist.init()
    total = unidist.all_reduce(torch.tensor(unidist.rank() + 1.0, device=unidist.device())).item()
    size = unidist.world_size()
    if total != size * (size + 1) / 2:
        raise ArithmeticError(f"the sum of 1 to {size} over the ranks came out as {total}")
    if unidist.is_main():
        print(f"WORKS with {size} ranks", flush=True)
    unidist.shutdown()

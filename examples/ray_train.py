"""Trains a small GPT with Ray Train: the training script of the other examples, in workers that Ray has started.

    python examples/ray_train.py --workers 4 -- --steps 100

Words behind ``--`` are the script's own. Ray sets up ``torch.distributed`` in every worker, and ``smp.init()`` takes the ranks
from there. Needs ``pip install "ray[train]"``. The last line is ``ray train: steps=… val_loss=… weights=PATH``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ray
from corpus import make_corpus
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

ENTRYPOINTS = Path(__file__).resolve().parent.parent / "entrypoints"


def train(config: dict[str, Any]) -> None:
    """Run the script on every worker as if it had been started with ``config["words"]``."""
    sys.path.insert(0, config["folder"])
    sys.argv = ["train_gpt.py", *config["words"]]
    import train_gpt

    import smdistributed.modelparallel.torch as smp

    train_gpt.main()
    smp.shutdown()  # the worker lives on for a while


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="ranks")
    parser.add_argument(
        "--cpus", type=float, default=1.0, help="cores of each; below 1 where there are fewer than workers"
    )
    parser.add_argument("--gpu", action="store_true", help="a GPU for each")
    parser.add_argument("--folder", type=Path, default=Path("ray-train"), help="of text, weights and Ray's own files")
    parser.add_argument("words", nargs="*", help="of the script")
    args = parser.parse_args()
    folder = args.folder.absolute()
    text = make_corpus(folder / "text").parent
    # What the platform's hyperparameters are elsewhere: the script says smp.init() without a word.
    parameters = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
    ray.init(runtime_env={"env_vars": {"SM_HP_MP_PARAMETERS": json.dumps(parameters)}}, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "folder": str(ENTRYPOINTS),
            "words": [
                *(f"--train={text}", f"--model_dir={folder / 'model'}", f"--checkpoint_dir={folder / 'checkpoints'}"),
                *args.words,
            ],
        },
        scaling_config=ScalingConfig(
            num_workers=args.workers, use_gpu=args.gpu, resources_per_worker={"CPU": args.cpus, "GPU": int(args.gpu)}
        ),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    reached = json.loads((folder / "model" / "metrics.json").read_text())
    print(f"ray train: steps={reached['steps']} val_loss={reached['val_loss']} weights={folder / 'model' / 'model.pt'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

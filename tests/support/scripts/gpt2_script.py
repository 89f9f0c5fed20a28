"""A script for the original library: it pretrains a GPT-2 with the calls of AWS's public sample, in the sample's order.

It runs as the entry point of a job, or as ``main(words)`` in a rank of the pool.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys

import torch
from torch import optim

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (  # noqa: F401  as the sample does
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


class Lines(torch.utils.data.Dataset):
    """Token ids and masks, a line of JSON each."""

    def __init__(self, folder):
        paths = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".json"))
        self.lines = [line for path in paths for line in open(path)]  # noqa: SIM115

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        record = json.loads(self.lines[index])
        return torch.tensor(record["input_ids"]), torch.tensor(record["attention_mask"])


class Nothing(torch.utils.data.Dataset):
    """What ranks of later stages feed: as many samples, each of two empty float tensors."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.Tensor(0), torch.Tensor(0)


def create_dataloader(folder, batch_size, seed, dp_rank, dp_size, *, shuffle):
    if smp.pp_rank() != 0:
        count = smp.recv_from(0, smp.RankType.PP_RANK)
        return torch.utils.data.DataLoader(Nothing(count * batch_size), batch_size=batch_size, drop_last=True)
    data = Lines(folder)
    sampler = torch.utils.data.DistributedSampler(
        data, shuffle=shuffle, seed=seed, rank=dp_rank, num_replicas=dp_size, drop_last=True
    )
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler, batch_size=batch_size, num_workers=0, pin_memory=True, drop_last=True
    )
    smp.broadcast(len(loader), smp.PP_GROUP)
    return loader


class Decay:
    """A learning rate that falls linearly; it sets the rates of all groups itself, and is no PyTorch scheduler."""

    def __init__(self, optimizer, start, total):
        self.optimizer, self.start, self.total, self.count = optimizer, start, total, 0
        self.step(0)

    def step(self, count=None):
        self.count = self.count + 1 if count is None else count
        for group in self.optimizer.param_groups:
            group["lr"] = self.start * (self.total - self.count) / self.total

    def state_dict(self):
        return {"start": self.start, "total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.start, self.total = state["start"], state["total"]
        self.step(state["count"])


def groups_by_weight_decay(module):
    decayed, others, seen = {"params": []}, {"params": [], "weight_decay": 0.0}, set()
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                is_plain = name != "bias" and not isinstance(part, FusedLayerNorm)
                (decayed if is_plain else others)["params"].append(parameter)
    return decayed, others


def param_shapes(model, optimizer):
    """Names and whole shapes of what the optimizer's flat groups hold, in their order."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    found = []
    for group in optimizer.fp16_groups:
        assert all((p.ds_numel if hasattr(p, "ds_numel") else p.numel()) > 0 for p in group)
        found.append({names[p]: p.ds_shape if hasattr(p, "ds_shape") else p.shape for p in group})
    return found


def buffer_names(model):
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in model.module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def evaluate(model, loader, batches):
    model = model.eval()
    loss, count = 0.0, 0
    with torch.no_grad():
        for index, (input_ids, attention_mask) in enumerate(loader):
            if index >= batches:
                break
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            count += 1
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    model.train()
    return loss.item() / smp.dp_size() / count


def create_model(args, config):
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.modeling_utils import PreTrainedModel

    usual = PreTrainedModel.init_weights
    if args.use_distributed_transformer:
        PreTrainedModel.init_weights = lambda x: None
    set_seed(args.seed)
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.get_default_dtype()
    try:
        with smp.model_creation(
            tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
            dtype=dtype,
            attention_in_fp32=False,
            query_key_layer_scaling=not args.bf16,
            fused_softmax=True,
            fused_dropout=False,
            fused_bias_gelu=True,
        ):
            model = AutoModelForCausalLM.from_config(config)
        count = sum(math.prod(p.ds_shape if hasattr(p, "ds_shape") else p.size()) for p in set(model.parameters()))
        torch.cuda.set_device(smp.local_rank())
        return smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1), count
    finally:  # for the next script of a rank of the pool
        PreTrainedModel.init_weights = usual


def layers_of(model, args):
    """The layers, on their stages and checkpointed."""
    module = model.get_module()
    layers = module.transformer.seq_layers if args.use_distributed_transformer else module.transformer.h
    if args.manual_partition:
        for index, layer in enumerate(layers.children()):
            smp.set_partition(layer, index * smp.pp_size() // args.num_layers)
    return layers


def parse(words):
    parser = argparse.ArgumentParser()
    for name, value in {"max_steps": 6, "seed": 12345, "train_batch_size": 4, "checkpoint_freq": 3, "microbatches": 2,
                        "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 1,
                        "prescaled_batch": 0, "shard_optimizer_state": 0, "fp16": 0, "bf16": 0, "manual_partition": 0,
                        "use_distributed_transformer": 1, "load_partial": 0, "save_final_full_model": 0,
                        "max_context_width": 16, "vocab_size": 48, "hidden_width": 32, "num_layers": 4,
                        "num_heads": 4, "activation_checkpointing": 1, "delayed_param": 0}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--training-dir", default=os.environ.get("SM_CHANNEL_TRAIN"))
    parser.add_argument("--test-dir", default=os.environ.get("SM_CHANNEL_TEST"))
    parser.add_argument("--checkpoint-dir", default="/opt/ml/checkpoints")
    return parser.parse_known_args(words)[0]


def main(words):
    """Trains as ``words`` say; gives the losses of this rank's steps by their number, and the last validation loss."""
    from transformers import GPT2Config, set_seed

    args = parse(words)
    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "microbatches": args.microbatches,
            "shard_optimizer_state": args.shard_optimizer_state > 0,
            "prescaled_batch": args.prescaled_batch > 0,
            "fp16": args.fp16 > 0,
            "bf16": args.bf16 > 0,
            "offload_activations": False,
            "delayed_parameter_initialization": args.delayed_param > 0,
            "optimize": "speed",
            "placement_strategy": "cluster",
            "activation_loading_horizon": 4,
            "skip_tracing": False,
            "auto_partition": not args.manual_partition,
            "default_partition": 0,
            "static_mode": False,
            "fast_mode": False,
            "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        }
    )
    config = GPT2Config(
        vocab_size=args.vocab_size, n_positions=args.max_context_width, n_embd=args.hidden_width,
        n_layer=args.num_layers, n_head=args.num_heads, n_inner=None, activation_function="gelu_new", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-05, initializer_range=0.02, use_cache=False,
        bos_token_id=1, eos_token_id=1, return_dict=True,
    )  # fmt: skip
    model, count = create_model(args, config)
    layers = layers_of(model, args)
    optimizer = optim.Adam(groups_by_weight_decay(model.get_module()), betas=(0.9, 0.95), lr=args.lr, weight_decay=0.01)
    if args.activation_checkpointing:
        if args.use_distributed_transformer:
            smp.set_activation_checkpointing(layers, strategy="each")
        else:
            for layer in layers.children():
                smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    scheduler = Decay(optimizer, args.lr, 1000)
    done = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=None, partial=True)
        done = content["total_steps"]
        assert content["model_config"].n_embd == args.hidden_width
        assert content["num_params"] == count
        scheduler.load_state_dict(content["lr_scheduler"])
    losses, validation = train(args, config, model, optimizer, scheduler, count, done)
    if args.save_final_full_model:
        save_whole(args, config, model, optimizer, count)
    smp.barrier()
    if smp.rank() == 0:
        print("SMP training finished successfully")
    set_seed(0)
    return {"losses": losses, "validation": validation}


def train(args, config, model, optimizer, scheduler, count, done):
    dp_rank, dp_size = (smp.rdp_rank(), smp.rdp_size()) if args.prescaled_batch else (smp.dp_rank(), smp.dp_size())
    loader, val_loader = (
        create_dataloader(folder, args.train_batch_size, args.seed, dp_rank, dp_size, shuffle=shuffle)
        for folder, shuffle in ((args.training_dir, False), (args.test_dir, True))
    )
    torch.manual_seed(args.seed)
    model.train()
    losses, validation = {}, None
    for index, (input_ids, attention_mask) in enumerate(loader):
        if index < done:
            continue
        if done >= args.max_steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, optimizer, input_ids, attention_mask, args).reduce_mean()
        torch.cuda.empty_cache()
        if args.fp16:
            optimizer.clip_master_grads(1.0)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            scheduler.step()
        done += 1
        losses[done] = loss.item()
        if smp.rank() == 0:
            print(f"Batch {done - 1} Loss: {loss.item()}")
        if done % args.checkpoint_freq == 0:
            validation = evaluate(model, val_loader, 2)
            content = {
                "cli_args": args.__dict__,
                "num_params": count,
                "total_steps": done,
                "model_config": config,
                "lr_scheduler": scheduler.state_dict(),
            }
            if args.sharded_data_parallel_degree > 1:
                content |= {"buffer_names": buffer_names(model), "param_shapes": param_shapes(model, optimizer)}
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{done}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=content,
                num_kept_partial_checkpoints=5,
            )
    return losses, validation


def save_whole(args, config, model, optimizer, count):
    content = {"cli_args": args.__dict__, "num_params": count, "total_steps": args.max_steps, "model_config": config}
    if args.sharded_data_parallel_degree > 1:  # the sample's way to a whole model from shards
        content |= {"buffer_names": buffer_names(model), "param_shapes": param_shapes(model, optimizer)}
        tag = f"sharded_data_parallel_final_full_{count}"
        smp.save_checkpoint(
            args.model_dir, tag=tag, partial=True, model=model, optimizer=optimizer, user_content=content
        )
    else:
        smp.save_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False, model=model, user_content=content)


if __name__ == "__main__":
    torch.cuda.synchronize()
    found = main(sys.argv[1:])
    with open(os.path.join(os.environ["SM_MODEL_DIR"], f"found_{smp.rank()}.json"), "w") as file:
        json.dump(found, file)

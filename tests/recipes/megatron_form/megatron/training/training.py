"""Pretraining, in the form that megatron.training.training has at core_v0.16.1.

Functions have its names and signatures, and call each other by name; what is collective there is
collective here: losses, evaluation, saves, barriers of timers, logs.
"""

from __future__ import annotations

import sys
import time

import torch
from megatron.core import mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from .checkpointing import save_checkpoint
from .data_samplers import build_pretraining_data_loader
from .global_vars import get_args, get_signal_handler, get_timers
from .initialize import initialize_megatron

_TRAIN_START_TIME = time.time()


def pretrain(train_valid_test_dataset_provider, model_provider, forward_step_func) -> None:
    initialize_megatron()
    args = get_args()
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(model_provider)
    iterators = [
        build_train_valid_test_data_iterators(train_valid_test_dataset_provider) for _ in model
    ]
    train_data_iterator, valid_data_iterator = (
        iterators[0] if len(model) == 1 else zip(*iterators, strict=True)
    )
    if len(model) > 1:
        train_data_iterator, valid_data_iterator = (
            list(train_data_iterator),
            list(valid_data_iterator),
        )
    timers = get_timers()
    timers("setup", log_level=0).start(barrier=True)
    timers("setup").stop()
    iteration = 0
    if args.do_train:
        iteration, _ = train(
            forward_step_func,
            model,
            optimizer,
            opt_param_scheduler,
            train_data_iterator,
            valid_data_iterator,
            None,
            get_model_config(model[0]),
            {},
            None,
        )
    if args.save and iteration % args.save_interval:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    if args.eval_iters:
        config = get_model_config(model[0])
        evaluate_and_print_results(
            "the end", forward_step_func, valid_data_iterator, model, iteration, None, config
        )


def setup_model_and_optimizer(model_provider_func):
    args = get_args()
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    chunks = [model_provider_func(vp_stage=stage) for stage in range(num_chunks)]
    if args.bf16 or args.fp16:
        chunks = [Float16Module(get_model_config(chunk), chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        grad_reduce_in_fp32=args.bf16,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        bucket_size=args.ddp_bucket_size if args.overlap_grad_reduce else None,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    model = [
        DistributedDataParallel(
            get_model_config(chunk), ddp_config, chunk, disable_bucketing=number > 0
        )
        for number, chunk in enumerate(chunks)
    ]
    gathers = {"overlap_param_gather": args.overlap_param_gather}
    if not hasattr(OptimizerConfig, "overlap_param_gather"):  # core 0.12
        gathers = {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            clip_grad=1.0,
            bf16=args.bf16,
            fp16=args.fp16,
            initial_loss_scale=2.0**16,
            loss_scale_window=4,
            hysteresis=1,
            use_distributed_optimizer=args.use_distributed_optimizer,
            log_num_zeros_in_grad=args.log_num_zeros_in_grad,
            params_dtype=get_model_config(model[0]).params_dtype,
            **gathers,
        ),
        model,
        use_gloo_process_groups=args.enable_gloo_process_groups,
    )
    steps = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
    opt_param_scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=3 * args.global_batch_size,
        lr_decay_steps=steps,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    return model, optimizer, opt_param_scheduler


def build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider):
    args = get_args()
    loaders = (None, None)
    flags = torch.zeros(2, dtype=torch.long)
    if mpu.get_tensor_model_parallel_rank() == 0:
        train_ds, valid_ds = build_train_valid_test_datasets_provider()
        loaders = (
            build_pretraining_data_loader(train_ds, args.consumed_train_samples),
            build_pretraining_data_loader(valid_ds, args.consumed_valid_samples),
        )
        flags = torch.tensor([1, int(args.eval_iters > 0)], dtype=torch.long)
    torch.distributed.broadcast(flags, 0)
    args.do_train, args.do_valid, args.do_test = *flags.tolist(), False
    return loaders


def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    loaders = build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider)
    cyclic = get_args().dataloader_type == "cyclic"
    return tuple(
        None if loader is None else iter(cyclic_iter(loader) if cyclic else loader)
        for loader in loaders
    )


def cyclic_iter(loader):
    while True:
        yield from loader


def train_step(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    config,
    forward_backward_func,
    iteration=None,
):
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses_reduced = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
    )
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    if update_successful:
        increment = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        opt_param_scheduler.step(increment=increment)
    loss_reduced = {}
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        total = torch.vstack([one["lm loss"] for one in losses_reduced]).sum(dim=0)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(total, group=group)
        loss_reduced["lm loss"] = total[0] / total[1]
    skipped = int(not update_successful)
    return loss_reduced, skipped, False, False, 0, grad_norm, num_zeros_in_grad, 0


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    grad_norm,
    params_norm,
    num_zeros_in_grad,
    max_attention_logit,
    pg_collection=None,
    is_first_iteration=False,
):
    args = get_args()
    timers = get_timers()
    if iteration % args.log_interval == 0:
        elapsed = timers("interval-time").elapsed(barrier=True)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            loss = loss_dict["lm loss"].item()
            print(
                f"iteration {iteration}/{args.train_iters} consumed {args.consumed_train_samples} "
                f"lm loss {loss!r} scale {loss_scale:g} lr {learning_rate:g} norm {grad_norm} "
                f"skipped {skipped_iter} elapsed {elapsed:.3f}",
                flush=True,
            )
        timers.log(["interval-time"], normalizer=args.log_interval)
    return report_memory_flag


def disable_forward_pre_hook(model_chunks, param_sync=True) -> None:
    for chunk in model_chunks:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def enable_forward_pre_hook(model_chunks) -> None:
    for chunk in model_chunks:
        chunk.enable_forward_pre_hook()


def force_param_sync(model_chunks) -> None:
    for chunk in model_chunks:
        chunk.start_param_sync(force_sync=True)


def save_checkpoint_and_time(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    num_floating_point_operations_so_far,
    checkpointing_context,
    non_persistent_ckpt=False,
    train_data_iterator=None,
) -> None:
    timers = get_timers()
    timers("interval-time").stop()
    timers("save-checkpoint", log_level=0).start(barrier=True)
    if should_disable_forward_pre_hook(get_args()):
        force_param_sync(model)
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    timers("save-checkpoint").stop(barrier=True)
    timers.log(["save-checkpoint"])
    timers("interval-time", log_level=0).start(barrier=True)


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    checkpointing_context,
    non_loss_data_func,
    inference_model=None,
):
    args = get_args()
    timers = get_timers()
    for chunk in model:
        chunk.train()
    iteration = start_iteration = args.iteration
    config.grad_scale_func = optimizer.scale_loss
    config.timers = timers
    if args.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions if len(model) > 1 else functions[0]
    config.finalize_model_grads_func = finalize_model_grads
    timers("interval-time", log_level=0).start(barrier=True)
    forward_backward_func = get_forward_backward_func()
    hooks_are_on = should_exit = False
    if should_disable_forward_pre_hook(args):
        disable_forward_pre_hook(model, param_sync=False)
    num_microbatches = get_num_microbatches()
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != num_microbatches and iteration:
            assert get_num_microbatches() > num_microbatches
        num_microbatches = get_num_microbatches()
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        args.curr_iteration = iteration
        loss_dict, skipped_iter, _, should_exit, _, grad_norm, num_zeros, *max_logit = train_step(
            forward_step_func,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=iteration,
        )
        if should_exit:
            break
        if iteration == start_iteration:
            if skipped_iter:
                start_iteration = iteration + 1
            elif should_disable_forward_pre_hook(args):
                enable_forward_pre_hook(model)
                hooks_are_on = True
        iteration += 1
        args.consumed_train_samples += (
            args.data_parallel_size * args.micro_batch_size * get_num_microbatches()
        )
        training_log(
            loss_dict,
            {},
            optimizer.param_groups[0]["lr"],
            iteration,
            optimizer.get_loss_scale().item(),
            False,
            skipped_iter,
            grad_norm,
            None,
            num_zeros,
            max_logit,
        )
        if iteration % args.eval_interval == 0 and args.do_valid:
            timers("interval-time").stop()
            if should_disable_forward_pre_hook(args):
                disable_forward_pre_hook(model)
            evaluate_and_print_results(
                f"iteration {iteration}",
                forward_step_func,
                valid_data_iterator,
                model,
                iteration,
                process_non_loss_data_func,
                config,
            )
            if should_disable_forward_pre_hook(args):
                enable_forward_pre_hook(model)
            timers("interval-time", log_level=0).start(barrier=True)
        should_exit = checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, 0, {}, train_data_iterator
        )
        if should_exit:
            break
    if hooks_are_on:
        disable_forward_pre_hook(model)
    if should_exit:
        sys.exit(0)
    return iteration, 0


def checkpoint_and_decide_exit(
    model,
    optimizer,
    opt_param_scheduler,
    iteration,
    num_floating_point_operations_so_far,
    checkpointing_context,
    train_data_iterator,
) -> bool:
    args = get_args()
    if args.exit_signal_handler and any(get_signal_handler().signals_received()):
        return True
    if args.save and iteration % args.save_interval == 0:
        save_checkpoint_and_time(
            iteration,
            model,
            optimizer,
            opt_param_scheduler,
            num_floating_point_operations_so_far,
            checkpointing_context,
            train_data_iterator=train_data_iterator,
        )
    if args.exit_duration_in_mins:
        minutes = (time.time() - _TRAIN_START_TIME) / 60
        is_over = torch.tensor([float(minutes > args.exit_duration_in_mins)])
        torch.distributed.all_reduce(is_over, op=torch.distributed.ReduceOp.MAX)
        if is_over.item():
            return True
    return bool(args.exit_interval) and iteration % args.exit_interval == 0


def evaluate_and_print_results(
    prefix,
    forward_step_func,
    data_iterator,
    model,
    iteration,
    process_non_loss_data_func,
    config,
    verbose=False,
    write_to_tensorboard=True,
    non_loss_data_func=None,
) -> None:
    args = get_args()
    timers = get_timers()
    timers("evaluate", log_level=0).start(barrier=True)
    for chunk in model:
        chunk.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses = get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=True,
            )
            args.consumed_valid_samples += args.global_batch_size
            for one in losses:
                total += one["lm loss"]
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(total, group=group)
        print(f"validation loss at {prefix} | {float(total[0] / total[1])!r}", flush=True)
    for chunk in model:
        chunk.train()
    timers("evaluate").stop()


def should_disable_forward_pre_hook(args) -> bool:
    return args.use_distributed_optimizer and args.overlap_param_gather

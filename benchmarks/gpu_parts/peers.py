"""Measure the training rates of other implementations and of ours in one run, on the same samples and device.

Shape legend in ``kernels/__init__.py``.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts.page import OURS
from benchmarks.gpu_parts.report import Figure
from benchmarks.gpu_parts.scale import Context, micro_batches, samples_of
from benchmarks.gpu_parts.step import rate, recipe
from benchmarks.gpu_parts.timing import Ceilings, measured, release, timed_row
from benchmarks.training.hugging_face import new_model, padded
from bert.model import BertForPreTraining, EncoderLayer
from dataloading.batches.loader import Batch
from kernels.libraries.pytorch import varlen_attention
from kernels.reference.ops import summed_embeddings

_EAGER = "Hugging Face, padded, SDPA"


def peers(context: Context) -> None:
    """Measure a training step of each peer. All peers use fp32 weights under bf16 autocast and PyTorch's fused AdamW."""
    sides: dict[str, Callable[[Context, int], Callable[[], None]]] = {
        "plain PyTorch varlen, unpadded": _plain_varlen,
        _EAGER: _hugging_face,
        f"{_EAGER}, torch.compile": partial(_hugging_face, compiled=True),
    }
    ceilings = Ceilings.of(context)
    for precision, name in OURS.items():
        config = recipe("h100_1x1", gradient_accumulation_steps=1, precision=precision.lower())
        context.report.attempt(name, partial(rate, context, name, config, context.scale.sequences, ceilings))
    for name, side in sides.items():
        context.report.attempt(name, partial(_peer_row, context, name, side))


def _peer_row(context: Context, name: str, side: Callable[[Context, int], Callable[[], None]]) -> Figure:
    """Return the peer's rate with the largest batch that fits into memory: as many sequences as ours, half, or a quarter."""
    # Try smaller batches too, because a peer that pads needs more memory per sequence.
    for parts in (1, 2, 4):
        sequences, seconds = context.scale.sequences // parts, []
        with suppress(torch.OutOfMemoryError):
            seconds = measured(side(context, sequences), context.device, context.scale.repeats, cold=False)
        if seconds:
            # Without compilation, Transformers checks on the host whether attention needs the mask, so the host waits.
            waits = "; the host waits for the device in every step" if name == _EAGER else ""
            note = f"{sequences} sequences at once{waits}"
            return timed_row(name, seconds, sequences, "sequences/s", note=note, page=True)
        # Release the memory that PyTorch has cached for the failed attempt.
        release(context.device)
    return Figure(name, note="does not fit the device's memory", page=True)


def _hugging_face(context: Context, sequences: int, *, compiled: bool = False) -> Callable[[], None]:
    with context.device:  # drawing the weights on a GPU is many times faster
        model = new_model(context.scale.model).train()
    samples = samples_of(context.scale, sequences)
    inputs = {
        name: tensor.to(context.device)
        for name, tensor in padded(samples, context.scale.model.max_position_embeddings).items()
    }
    called = model
    if compiled:
        # All padded batches have the same shape.
        called = torch.compile(model, dynamic=False, backend="inductor" if context.on_gpu else "aot_eager")
    return _step(context, model, lambda: called(**inputs).loss)


def _plain_varlen(context: Context, sequences: int) -> Callable[[], None]:
    """Prepare a step of our model in plain PyTorch ops. The step does less work, because attention lacks dropout."""
    model = context.model()
    (batch,) = micro_batches(context, sequences, 1)
    return _step(context, model, lambda: plain_loss(model, batch))


def _step(context: Context, model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        with torch.autocast(context.device.type, torch.bfloat16, enabled=context.on_gpu):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def plain_loss(model: BertForPreTraining, batch: Batch) -> Tensor:
    """Return the sum of the mean losses of both heads, by plain PyTorch ops. Every layer runs on every token."""
    p = model.config.hidden_dropout if model.training else 0.0
    tables = model.embeddings
    ids = batch.input_ids, batch.position_ids, batch.segment_ids
    embedded_TD = summed_embeddings(*ids, tables.word, tables.position, tables.segment)
    hidden_TD = F.dropout(_norm(embedded_TD, tables.norm, model), p)
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        hidden_TD = _plain_layer(hidden_TD, layer, model, batch, p)
    masked_MD = hidden_TD[batch.masked_lm_positions]
    wide_MD = F.gelu(model.transform(masked_MD), approximate="tanh")
    logits_MV = F.linear(_norm(wide_MD, model.transform_norm, model), tables.word, model.decoder_bias)
    # The first token of each sequence is [CLS].
    cls_SD = hidden_TD[batch.cu_seqlens[:-1].long()]
    next_sentence = F.cross_entropy(model.next_sentence_logits(cls_SD).float(), batch.next_sentence_labels)
    return F.cross_entropy(logits_MV.float(), batch.masked_lm_ids) + next_sentence


def _plain_layer(hidden_TD: Tensor, layer: EncoderLayer, model: BertForPreTraining, batch: Batch, p: float) -> Tensor:
    heads = model.config.num_attention_heads
    query, key, value = layer.query_key_value(hidden_TD).unflatten(-1, (3, heads, -1)).unbind(1)
    context_TD = plain_attention(query, key, value, batch.cu_seqlens, batch.max_seqlen).flatten(1)
    attended_TD = _norm(hidden_TD + F.dropout(layer.attention_output(context_TD), p), layer.attention_norm, model)
    wide_TF = F.gelu(layer.intermediate(attended_TD), approximate="tanh")
    return _norm(attended_TD + F.dropout(layer.output(wide_TF), p), layer.output_norm, model)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Compute attention without dropout, by PyTorch's varlen kernel if the tensors are on a GPU."""
    if not query.is_cuda:
        return varlen_attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen)
    from torch.nn.attention.varlen import varlen_attn  # imported here, because only GPU builds have it

    query, key, value = (x.contiguous() for x in (query, key, value))
    return cast("Tensor", varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))


def _norm(x: Tensor, norm: nn.LayerNorm, model: BertForPreTraining) -> Tensor:
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, model.config.layer_norm_eps)

"""Hugging Face's BERT with the same architecture, and its padded inputs, for comparison."""

import numpy as np
import torch
from torch import Tensor

from bert.configuration.sections import ModelConfig
from bert.model import BertForPreTraining
from dataloading.shards.samples import Samples


def new_model(config: ModelConfig, kind: str = "AutoModelForPreTraining", attention: str = "sdpa") -> torch.nn.Module:
    """Build a model with both pretraining heads, scaled-dot-product attention by default, and random weights."""
    import transformers  # imported here, because it is optional

    return getattr(transformers, kind).from_config(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_act="gelu_pytorch_tanh",  # the same approximation of GELU as in our model
            hidden_dropout_prob=config.hidden_dropout,
            attention_probs_dropout_prob=config.attention_dropout,
        ),
        attn_implementation=attention,
    )


def model_with_weights_of(model: BertForPreTraining) -> torch.nn.Module:
    """Build a Hugging Face model with the architecture and weights of ``model``."""
    # Import here, because the GPU benchmark uses this module without the packages that the import needs.
    from bert.checkpoints.hugging_face import to_hugging_face

    theirs = new_model(model.config)
    theirs.load_state_dict(to_hugging_face(model.state_dict()))
    return theirs


def padded(samples: Samples, length: int) -> dict[str, Tensor]:
    """Return keyword arguments for Hugging Face's model: int64 tensors [n, length], and next-sentence labels [n]."""
    # Row and column of every token in the padded batch.
    rows = np.repeat(np.arange(len(samples)), samples.lengths)
    columns = np.arange(len(rows)) - np.repeat(samples.sequence_offsets[:-1], samples.lengths)
    masked_rows = np.repeat(np.arange(len(samples)), samples.masked_counts)
    input_ids, token_type_ids, attention_mask = (np.zeros((len(samples), length), np.int64) for _ in range(3))
    labels = np.full((len(samples), length), -100)  # Hugging Face's cross-entropy ignores this label
    input_ids[rows, columns] = samples.input_ids
    token_type_ids[rows, columns] = samples.segment_ids
    attention_mask[rows, columns] = 1
    labels[masked_rows, samples.masked_lm_positions] = samples.masked_lm_ids
    arrays = {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "next_sentence_label": samples.next_sentence_labels.astype(np.int64),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}

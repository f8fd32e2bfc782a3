"""Mutants of Gemma 4: layers that share keys and values, inputs of single layers, sizes of local and global layers."""

from tests.mutants.plant import Mutant

DECODER, GEMMA4 = "mlx_engine/models/decoder.py", "mlx_engine/models/gemma4.py"
MLX_CONFIG = "mlx_engine/convert/mlx_folder.py"

MUTANTS = [
    Mutant("shares the first layer of its kind", GEMMA4, "Config.shares", "max", "min"),
    Mutant("values with the rotation of keys", DECODER, "_queries_and_keys", "v if normed is None else normed", "k"),
    Mutant("values without their norm", DECODER, "_queries_and_keys", "v if normed is None else normed", "v"),
    Mutant("a layer's output is not scaled", DECODER, "decoder_layer", "w.output_scale != 1", "False"),
    Mutant(
        "every layer has the first layer's input", GEMMA4, "_layer", "i * config.per_layer_size", "0"
    ),
    Mutant(
        "inputs of all rows for the wanted ones",
        DECODER,
        "decoder_layer",
        "be.take(own, batch.rows) if want == \"some\" else own",
        "be.take(own, range(len(batch.rows))) if want == \"some\" else own",
    ),
    Mutant("the input's norm spans all layers", GEMMA4, "Model.embed", "be.heads(projected, of.per_layer_size)",
           "be.heads(projected, of.per_layer_size * of.n_layers)"),
    Mutant(
        "the last layer with keys and values is skipped in a chunk",
        DECODER,
        "decoder_layers",
        "1 + max(i for i, w in enumerate(layers) if w.shares is None)",
        "max(i for i, w in enumerate(layers) if w.shares is None)",
    ),
    Mutant(
        "frequencies of a narrower head",
        "mlx_engine/config/rope.py",
        "proportional",
        "(0.0,) * (len(frequencies) - n)",
        "frequencies[n:]",
    ),
    Mutant("experts read the dense FFN's norm", DECODER, "feed_forward",
           "mixture_add(be, x, w.pre_ffw_norm_2, w.experts, dense)",
           "mixture_add(be, x, w.ffn_norm, w.experts, dense)"),
    Mutant("the dense FFN is added without its norm", DECODER, "feed_forward",
           "be.project_norm(h, down, w.post_ffw_norm_1)", "be.linear(h, down)"),
    Mutant("the router's input has the length of the hidden states", GEMMA4, "_mixture",
           "config.hidden_size**-0.5", "1.0"),
    Mutant("rotary settings of Qwen3.5 that mlx-lm does not read", MLX_CONFIG, "",
           '("ministral3", *INNER, *INNER.values(), *GEMMA4)', '("ministral3", *GEMMA4)'),
    Mutant("products of the first row", "kernels/cpu/program.py", "_multiply", "b_row * t + i", "i"),
]  # fmt: skip

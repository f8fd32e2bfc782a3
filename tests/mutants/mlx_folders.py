"""Mutants of MLX's quantised folders: settings, groups, kernels, and folders that are written."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "settings of single matrices forgotten",
        "mlx_engine/checkpoint/mlx_quantization.py",
        "Quantization.of",
        "return self.by_name.get(name, self.default)",
        "return self.default",
    ),
    Mutant(
        "group size not compared with the scales",
        "mlx_engine/checkpoint/mlx_quantization.py",
        "_check_shapes",
        "all(entry.shape == expected and entry.dtype == others[0].dtype for entry in others)",
        "all(entry.shape == others[0].shape for entry in others)",
    ),
    Mutant(
        "a quant that crosses two bytes cut off",
        "mlx_engine/quant/groups.py",
        "unpack",
        "shift + bits > 8",
        "shift + bits > 9",
    ),
    Mutant(
        "bias before scale in a block",
        "mlx_engine/quant/group_weight.py",
        "Parts.in_order",
        "(self.scales, self.biases, self.quants)",
        "(self.biases, self.scales, self.quants)",
    ),
    Mutant(
        "the last groups not joined",
        "mlx_engine/quant/group_weight.py",
        "join",
        "range(0, n, _PIECE)",
        "range(0, n - _PIECE, _PIECE)",
    ),
    Mutant(
        "affine weights without their bias",
        "kernels/cpu/affine.py",
        "_combine",
        "fma(scale, floats_of_words(quants), bias)",
        "mul(scale, floats_of_words(quants))",
    ),
    Mutant(
        "float32 scales rounded once",
        "kernels/cpu/affine.py",
        "_combine",
        "add(mul(scale, floats_of_words(quants)), bias)",
        "fma(scale, floats_of_words(quants), bias)",
    ),
    Mutant(
        "the second half of a piece is the first",
        "kernels/cpu/affine.py",
        "weights_of",
        "first + 2 * bits",
        "first",
    ),
    Mutant(
        "rope_parameters left to mlx-lm",
        "mlx_engine/convert/mlx_config.py",
        "config_for_mlx",
        'made.pop("rope_parameters", None)',
        'made.get("rope_parameters_", None)',
    ),
    Mutant(
        "matrices that are not quantised not named",
        "mlx_engine/convert/mlx_folder.py",
        "_quantization",
        "by_name[part.name.removesuffix(WEIGHT)] = False",
        "pass",
    ),
]

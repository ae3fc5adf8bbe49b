"""What the planner knows of each TensorFlow op type, in one table.

An op that is not listed is unknown: it is never recomputed, and nothing is assumed of the memory it
shares. Only ops without side effects and without state are listed as replayable; a test checks
every name and its statefulness against TensorFlow's registry.
"""

import dataclasses
import enum


class Kind(enum.Enum):
    """How an op may take part in a plan."""

    ELEMENTWISE = "elementwise"
    """One result per element; may write its result over an input that dies."""
    COMPARISON = "comparison"
    """Element by element, but of another dtype: never in place."""
    REDUCTION = "reduction"
    MOVEMENT = "movement"
    """Copies, gathers, concatenates, broadcasts."""
    NORMALIZATION = "normalization"
    """A few passes over its input: softmax, fused batch normalization, pooling, cross entropy."""
    RANDOM = "random"
    """Random numbers that are a function of a given seed."""
    VIEW = "view"
    """Shares its input's memory."""
    METADATA = "metadata"
    """Reads shapes, never values."""
    SOURCE = "source"
    """Constants, inputs, reads of variables: free to keep."""
    HEAVY = "heavy"
    """Matrix products and convolutions (Echo, section IV-A): never recomputed."""
    CONTROL_FLOW = "control flow"
    """Loops, calls, conditionals: kept whole."""
    UNKNOWN = "unknown"


REPLAYABLE = frozenset(
    {
        Kind.ELEMENTWISE,
        Kind.COMPARISON,
        Kind.REDUCTION,
        Kind.MOVEMENT,
        Kind.NORMALIZATION,
        Kind.RANDOM,
        Kind.VIEW,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """What is known of one op type."""

    kind: Kind
    passes: float = 1.0
    """How often it walks over its largest tensor, in time, as against one elementwise add."""
    gate_inputs: tuple[int, ...] | None = None
    """Inputs that may be tied to a late value without fixing a shape or an axis; None: any."""


_NAMES: dict[Kind, dict[float, str]] = {
    Kind.ELEMENTWISE: {
        1.0: """Abs Add AddV2 AddN BiasAdd BiasAddV1 Ceil ClipByValue Conj Div DivNoNan Floor
            FloorDiv Inv Invert LeakyRelu LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul
            MulNoNan Neg RealDiv Reciprocal Relu Relu6 Rint Round Select SelectV2 Sign Sqrt
            Square SquaredDifference Sub TruncateDiv ReluGrad Relu6Grad LeakyReluGrad EluGrad
            SeluGrad SigmoidGrad TanhGrad SqrtGrad RsqrtGrad ReciprocalGrad SoftplusGrad
            SoftsignGrad Rsqrt BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift ZerosLike
            OnesLike""",
        2.0: """Elu Exp Expm1 Log Log1p Mod FloorMod TruncateMod Selu Sigmoid Softplus Softsign Tanh
            Cos Sin Tan Xdivy Xlogy Xlog1py""",
        4.0: """Acos Acosh Asin Asinh Atan Atan2 Atanh Cosh Digamma Erf Erfc Erfinv Lgamma Ndtri Pow
            Sinh Zeta Betainc Igamma Igammac Polygamma BesselI0e BesselI1e""",
    },
    Kind.COMPARISON: {
        1.0: """Equal NotEqual Greater GreaterEqual Less LessEqual ApproximateEqual IsFinite IsInf
            IsNan Cast Real Imag Angle ComplexAbs Complex""",
    },
    Kind.REDUCTION: {
        1.0: "All Any ArgMax ArgMin BiasAddGrad EuclideanNorm L2Loss Max Mean Min Prod Sum",
        2.0: "Cumsum Cumprod CumulativeLogsumexp",
    },
    Kind.MOVEMENT: {
        1.0: """BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace DynamicStitch Fill Gather
            GatherNd GatherV2 InvertPermutation LinSpace MatrixBandPart MatrixDiag
            MatrixDiagPart MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV3 MirrorPad
            OneHot Pack Pad PadV2 Range Reverse ReverseSequence ReverseV2 Roll Slice
            SpaceToBatchND SpaceToDepth Split SplitV StridedSlice Tile Transpose Unpack
            ResizeBilinear ResizeNearestNeighbor""",
    },
    Kind.NORMALIZATION: {
        3.0: """FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 LogSoftmax Softmax
            SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits""",
        6.0: "AvgPool AvgPool3D LRN MaxPool MaxPool3D MaxPoolV2",
    },
    Kind.RANDOM: {
        4.0: """StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2
            StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt""",
        8.0: """StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal
            StatelessTruncatedNormalV2""",
    },
    Kind.VIEW: {
        0.0: """EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape Snapshot Squeeze
            StopGradient TensorListGetItem""",
    },
    Kind.METADATA: {0.0: "Rank Shape ShapeN Size BroadcastGradientArgs BroadcastArgs ConcatOffset"},
    Kind.SOURCE: {0.0: "Const Placeholder PlaceholderWithDefault ReadVariableOp VarHandleOp"},
    Kind.HEAVY: {
        1.0: """BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropFilter
            Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2 CudnnRNN
            CudnnRNNV2 CudnnRNNV3 CTCLoss CTCLossV2 DepthwiseConv2dNative
            DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Dilation2D
            Einsum FFT FFT2D FFT3D IFFT IFFT2D IFFT3D IRFFT IRFFT2D MatMul MatrixInverse
            MatrixSolve MatrixTriangularSolve Cholesky Qr RFFT RFFT2D SelfAdjointEigV2
            SparseTensorDenseMatMul Svd TopKV2""",
    },
    Kind.CONTROL_FLOW: {
        1.0: """Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
            StatelessWhile While""",
    },
}

# Where an op takes shapes, axes or indices beside its data, only the data may be gated. Gathers are
# gated at their indices: the table may be large.
_GATE_INPUTS: dict[str, tuple[int, ...]] = {
    "Concat": (1,),
    "Fill": (1,),
    "Gather": (1,),
    "GatherNd": (1,),
    "GatherV2": (1,),
    "LinSpace": (0, 1),
    "OneHot": (0, 2, 3),
    "Range": (),
    "ConcatV2": (0,),
    "DynamicStitch": (),
    "InvertPermutation": (),
    "Split": (1,),
    "TensorListGetItem": (1,),
}
_FIRST_INPUT_ONLY = frozenset(
    """All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum Cumsum Cumprod
    CumulativeLogsumexp BatchToSpaceND BroadcastTo MatrixBandPart MatrixDiagV3
    MatrixDiagPartV3 MatrixSetDiagV3 MirrorPad Pad PadV2 ReverseSequence ReverseV2 Reverse
    Roll Slice SpaceToBatchND SplitV StridedSlice Tile Transpose ResizeBilinear
    ResizeNearestNeighbor MaxPoolV2 Reshape ExpandDims ClipByValue""".split()
)
# Random ops are gated at their key or seed, never at the shape.
_SECOND_INPUT_ONLY = frozenset(_NAMES[Kind.RANDOM][4.0].split() + _NAMES[Kind.RANDOM][8.0].split())


def _gate_inputs(name: str) -> tuple[int, ...] | None:
    if name in _FIRST_INPUT_ONLY:
        return (0,)
    if name in _SECOND_INPUT_ONLY:
        return (1,)
    return _GATE_INPUTS.get(name)


TRAITS: dict[str, Traits] = {
    name: Traits(kind, passes, _gate_inputs(name))
    for kind, by_passes in _NAMES.items()
    for passes, names in by_passes.items()
    for name in names.split()
}
_UNKNOWN = Traits(Kind.UNKNOWN)
FOLDED_TRANSPOSE = "Transpose(folded)"
"""A transpose of matrices that only products read: they read what it reads instead."""
_ALL = {**TRAITS, FOLDED_TRANSPOSE: Traits(Kind.VIEW, 0.0, _gate_inputs("Transpose"))}
_VIEWS = frozenset(name for name, traits in _ALL.items() if traits.kind is Kind.VIEW)


def traits_of(op: str) -> Traits:
    """The traits of an op type; kind UNKNOWN for one that is not listed."""
    return _ALL.get(op, _UNKNOWN)


def is_view(op: str) -> bool:
    """Whether the op's outputs share the memory of its inputs, one by one."""
    return op in _VIEWS


def is_replayable(op: str) -> bool:
    """Whether running the op again gives the same result and nothing else."""
    return traits_of(op).kind in REPLAYABLE


def is_weight(op: str) -> bool:
    """Whether the op is a constant or a read of a variable, or reads but a shape."""
    reads = op in ("Const", "ReadVariableOp", "VarHandleOp")
    return reads or traits_of(op).kind is Kind.METADATA


def may_make_data(op: str) -> bool:
    """Whether what the op makes may be more than what it reads: it draws, or is not looked into."""
    return traits_of(op).kind in (Kind.RANDOM, Kind.CONTROL_FLOW, Kind.UNKNOWN)

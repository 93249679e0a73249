/* Graphs whose nodes, with those of their gradients, are every kernel: shared by the tests that
 * watch memory. Sizes are odd so that rows end inside vectors and blocks inside tiles; integer
 * inputs hold 0, 1, 2, 0, 1, ... */
#ifndef OMC_TESTS_KERNEL_GRAPHS_H
#define OMC_TESTS_KERNEL_GRAPHS_H

#define IN(name, type) "input %" name " : " type "\n"
#define WANT(name, type) "input %" name " : " type " grad\n"
#define IDS(type) "input %i : i64" type "\n"
#define SHAPE(n, elements) "const %s : i64[" #n "] = [" elements "]\n"
#define TAPS                                                                                   \
  "const %p : i64[3,2] = [0, -1, 0, 1, 1, 9]\nconst %w : f32[3,2] = [0.5, 0, 0.25, 2, 1, 0]\n" \
  "const %b : i64[2,2] = [0, 1, 1, 2]\nconst %v : f32[2,2] = [0.5, 0.25, 2, 1]\n"
#define Y(op) "%y = " op "\nreturn %y\n"
#define X(type) WANT("x", "f32" type)

static const char *const kernel_graphs[] = {
    /* elementwise ops that need more than float inputs */
    X("[3,37]") Y("Cast(%x) {to=11}"),
    X("[3,37]") Y("Cast(%x) {to=10}"),
    X("[3,37]") Y("Cast(%x) {to=7}"),
    X("[3,37]") WANT("z", "f32[5,700]") "%a, %b = Casts(%x, %z) {to=10}\nreturn %a, %b\n",
    X("[7,41]") Y("Dropout(%x) {p=0.3, subsequence=5}"),
    IN("n", "i64[5,37]") IN("m", "i64[37]") Y("BitShift(%n, %m) {direction=\"LEFT\"}"),
    IN("c", "bool[5,1]") X("[5,37]") WANT("z", "f32[37]") Y("Where(%c, %x, %z)"),

    /* reductions */
    X("[5,7,19]") SHAPE(2, "0, 2") Y("ReduceSum(%x, %s) {keepdims=0}"),
    X("[5,7,19]") SHAPE(1, "-1") Y("ReduceSum(%x, %s)"),
    X("[5,7,19]") SHAPE(1, "1") Y("ReduceMean(%x, %s)"),
    X("[70,33]") SHAPE(1, "0") "%r = ReduceSum(%x, %s)\n" Y("Cast(%r) {to=1}"),
    X("[70,33]") SHAPE(1, "0") Y("ReduceMax(%x, %s)"),
    X("[3,333]") Y("ReduceMin(%x) {keepdims=0}"),
    X("[3,33]") SHAPE(1, "1") Y("ReduceProd(%x, %s)"),
    X("[0,33]") SHAPE(1, "0") Y("ReduceSum(%x, %s)"),
    IN("n", "i64[5,37]") SHAPE(1, "1") Y("ReduceSum(%n, %s)"),
    X("[5,37]") Y("ArgMax(%x) {axis=-1, keepdims=0}"),
    X("[5,7,3]") Y("ArgMax(%x) {axis=1, keepdims=1}"),
    X("[5,37]") Y("ArgMin(%x) {axis=-1, keepdims=0}"),
    X("[5,7,3]") Y("ArgMin(%x) {axis=1, keepdims=1}"),
    X("[5,37]") SHAPE(1, "1") Y("CumSum(%x, %s)"),
    X("[9,5,3]") SHAPE(1, "0") Y("CumSum(%x, %s) {reverse=1, exclusive=1}"),

    X("[5,37]") SHAPE(1, "1") Y("CumProd(%x, %s)"),
    X("[9,5,3]") SHAPE(1, "0") Y("CumProd(%x, %s)"),
    X("[5,137]") SHAPE(1, "3") "%y, %a = TopK(%x, %s)\nreturn %y\n",
    X("[5,137]") SHAPE(1, "41") "%y, %a = TopK(%x, %s) {largest=0}\nreturn %y\n",
    X("[3,67,17]") SHAPE(1, "67") "%y, %a = TopK(%x, %s) {axis=1}\nreturn %y\n",
    IN("n", "i64[5,37]") SHAPE(1, "20") "_, %y = TopK(%n, %s)\nreturn %y\n",

    /* movement */
    X("[3,5]") WANT("z", "f32[3,19]") Y("Concat(%x, %z, %x) {axis=1}"),
    X("[3,1,7]") SHAPE(4, "2, 3, 5, 7") Y("Expand(%x, %s)"),
    X("[37]") SHAPE(2, "3, 37") Y("Expand(%x, %s)"),
    X("[3,7]") SHAPE(4, "1, -2, 2, 3") Y("Pad(%x, %s)"),
    X("[5,37]") "const %st : i64[2] = [4, 1]\nconst %en : i64[2] = [-99, 36]\n"
        "const %ax : i64[2] = [0, 1]\nconst %by : i64[2] = [-2, 3]\n"
        Y("Slice(%x, %st, %en, %ax, %by)"),
    X("[5,37]") SHAPE(3, "3, 33, 1")
        "%a, %b, %c = Split(%x, %s) {axis=1}\nreturn %a, %b, %c\n",
    X("[3,7]") SHAPE(2, "2, 3") Y("Tile(%x, %s)"),
    X("[33,65]") Y("Transpose(%x) {perm=[1, 0]}"),
    X("[3,5,2,17]") Y("Transpose(%x) {perm=[0, 2, 1, 3]}"),
    X("[3,5,7]") Y("Transpose(%x) {perm=[2, 1, 0]}"),
    X("[3,9,7]") Y("Trilu(%x) {upper=0}"),
    X("[6,35]") SHAPE(3, "5, 2, 21") "%r = Reshape(%x, %s)\n" Y("Sin(%r)"),

    /* gather */
    X("[3,37]") IDS("[7]") Y("Gather(%x, %i) {axis=0}"),
    X("[5,3,9]") IDS("[2,4]") Y("Gather(%x, %i) {axis=1}"),
    X("[5,7]") IDS("[5,3]") Y("GatherElements(%x, %i) {axis=1}"),
    X("[3,4,9]") IDS("[2,2]") Y("GatherND(%x, %i)"),
    X("[9,3,4]") IDS("[2,2]") Y("GatherND(%x, %i) {axis=1}"),
    X("[5,3,2]") IDS("[2,4]") Y("Gather(%x, %i) {axis=1}"),
    X("[11,2]") IDS("[7]") Y("Gather(%x, %i) {axis=0}"),
    X("[9,3,4,2]") IDS("[2,2]") Y("GatherND(%x, %i) {axis=1}"),
    X("[6,5,33]") IDS("[5,5,20]") Y("GatherElements(%x, %i) {axis=0}"),
    X("[7,5,20]") IDS("[7,5,20]") WANT("z", "f32[7,9,33]") Y("GatherElementsGrad(%x, %i, %z) {axis=1}"),
    X("[7,5,20]") IDS("[7,5,20]") WANT("z", "f32[9,5,20]") Y("GatherElementsGrad(%x, %i, %z) {axis=0}"),
    X("[40,7,3]") IDS("[7]") WANT("z", "f32[40,11,3]") Y("GatherGrad(%x, %i, %z) {axis=1}"),
    X("[1,7,8]") IDS("[7]") WANT("z", "f32[1,911,8]") Y("GatherGrad(%x, %i, %z) {axis=1}"),
    X("[2,7,8]") IDS("[7]") WANT("z", "f32[2,911,8]") Y("GatherGrad(%x, %i, %z) {axis=1}"),
    X("[7,37]") IDS("[7]") WANT("z", "f32[11,37]") Y("GatherGrad(%x, %i, %z) {axis=0}"),
    X("[5,3]") IDS("[5,3]") WANT("z", "f32[5,7]") Y("GatherElementsGrad(%x, %i, %z) {axis=1}"),
    X("[5,7]") IDS("[5,20]") WANT("z", "f32[5,20]") Y("ScatterElements(%x, %i, %z) {axis=1, reduction=\"mul\"}"),
    X("[6,5,33]") IDS("[6,5,20]") WANT("z", "f32[6,5,20]") Y("ScatterElements(%x, %i, %z) {axis=0, reduction=\"max\"}"),
    IN("n", "i64[5,7]") IDS("[5,3]") IN("m", "i64[5,3]") Y("ScatterElements(%n, %i, %m) {axis=1, reduction=\"min\"}"),
    X("[2,9]") IDS("[2,2]") WANT("z", "f32[3,4,9]") Y("GatherNDGrad(%x, %i, %z)"),
    X("[9,2]") IDS("[2,2]") WANT("z", "f32[9,3,4]") Y("GatherNDGrad(%x, %i, %z) {axis=1}"),
    X("[11,37]") IDS("[5,3]") Y("Embedding(%x, %i) {padding_idx=1}"),
    X("[11,37]") IDS("[5,3]") Y("Embedding(%x, %i) {scale_grad_by_freq=1}"),
    X("[5,3,37]") IDS("[5,3]") WANT("z", "f32[11,37]") Y("EmbeddingGrad(%x, %i, %z) {shape=[11,37]}"),

    X("[3,2]") TAPS Y("Resample(%x, %p, %w, %b, %v) {axis=1}"),
    X("[2,37]") TAPS Y("Resample(%x, %p, %w, %b, %v) {axis=0}"),

    X("[7,37]") WANT("w", "f32[3,37,19]") "const %at : i64[3] = [2, 2, 6]\n" Y("GroupedMatMul(%x, %w, %at)"),
    X("[300,37]") WANT("w", "f32[2,70,37]") "const %at : i64[2] = [120, 300]\n"
        Y("GroupedMatMul(%x, %w, %at) {transB=1}"),
    X("[7,37]") "const %at : i64[3] = [0, 2, 2]\n" Y("SegmentSum(%x, %at)"),
    X("[2,37]") "const %at : i64[3] = [0, 3, 5]\n" Y("SegmentSpread(%x, %at) {closed=1, shape=[7,37]}"),

    /* linear algebra */
    X("[67,129]") WANT("z", "f32[129,33]") Y("MatMul(%x, %z)"),
    X("[5,801]") WANT("z", "f32[801,37]") Y("MatMul(%x, %z)"),
    X("[2,1,5,7]") WANT("z", "f32[3,7,9]") Y("MatMul(%x, %z)"),
    X("[5]") WANT("z", "f32[5,3]") Y("MatMul(%x, %z)"),
    X("[1,1]") WANT("z", "f32[1,1]") Y("MatMul(%x, %z)"),
    X("[33,15]") WANT("z", "f32[47,33]") WANT("b", "f32[47]")
        Y("FusedMatMul(%x, %z, %b) {transA=1, transB=1, alpha=0.5}"),
    X("[3,15,33]") WANT("z", "f32[3,47,33]") Y("FusedMatMul(%x, %z) {transB=1}"),
    X("[2,3,70,9]") WANT("k", "f32[2,3,71,9]") WANT("v", "f32[2,3,71,5]")
        "%y, %o = Attention(%x, %k, %v) {scale=0.3, is_causal=1, p=0.25, subsequence=3}\nreturn %y\n",
    X("[2,4,7,16]") WANT("k", "f32[2,2,9,16]") WANT("v", "f32[2,2,9,16]") IN("m", "bool[2,1,7,9]")
        "%y, %o = Attention(%x, %k, %v, %m) {scale=0.25}\nreturn %y\n",
    X("[1,2,5,3]") WANT("k", "f32[1,2,67,3]") WANT("v", "f32[1,2,67,3]") IN("m", "f32[67]")
        "%y, %o = Attention(%x, %k, %v, %m) {scale=0.25}\nreturn %y\n",
    X("[1,2,5,3]") WANT("k", "f32[1,2,67,3]") WANT("v", "f32[1,2,67,3]") IN("m", "f32[32]")
        "const %hidden : f32[35] = [-inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, "
        "-inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, "
        "-inf, -inf, -inf, -inf, -inf, 0, -1, 0]\n%all = Concat(%m, %hidden) {axis=0}\n"
        "%y, %o = Attention(%x, %k, %v, %all) {scale=0.25, p=0.25, subsequence=3}\nreturn %y\n",
    X("[2,3,9,11]") WANT("w", "f32[5,3,3,3]") WANT("b", "f32[5]")
        Y("Conv(%x, %w, %b) {strides=[2, 1], pads=[1, 1, 1, 1]}"),
    X("[2,3,7,7]") WANT("w", "f32[17,3,1,1]") Y("Conv(%x, %w)"),
    X("[2,6,10,9]") WANT("w", "f32[9,2,3,3]")
        Y("Conv(%x, %w) {strides=[1, 2], pads=[2, 1, 2, 1], dilations=[2, 1], group=3}"),
    X("[2,5,9,9]") WANT("w", "f32[5,1,3,3]") Y("Conv(%x, %w) {pads=[1, 1, 1, 1], group=5}"),
    X("[1,3,33,35]") WANT("w", "f32[7,3,7,7]") Y("Conv(%x, %w) {strides=[2, 2], pads=[3, 3, 3, 3]}"),
    X("[2,3,17]") WANT("w", "f32[4,3,5]") Y("Conv(%x, %w) {strides=[2], pads=[2, 2]}"),
    X("[2,5,4,39]") WANT("w", "f32[6,5,1,1]") Y("Conv(%x, %w) {strides=[2, 2]}"),
    X("[1,4,3,38]") WANT("w", "f32[5,4,2,3]") Y("Conv(%x, %w) {strides=[1, 2], pads=[0, 1, 1, 0]}"),
    X("[2,4,3,5,4]") WANT("w", "f32[6,2,2,3,2]")
        Y("Conv(%x, %w) {strides=[1, 2, 1], pads=[1, 0, 2, 0, 1, 1], dilations=[2, 1, 1], group=2}"),
    X("[2,4,5,6]") WANT("w", "f32[4,3,3,2]") WANT("b", "f32[6]")
        Y("ConvTranspose(%x, %w, %b) {strides=[2, 3], pads=[1, 0, 1, 0], group=2, output_padding=[1, 2]}"),

    /* neural network */
    X("[5,37]") Y("Softmax(%x) {axis=-1}"),
    X("[5,7,19]") Y("Softmax(%x) {axis=1}"),
    X("[5,37]") Y("LogSoftmax(%x) {axis=1}"),
    X("[5,7,19]") Y("LogSoftmax(%x) {axis=0}"),
    X("[7,37]") IDS("[7]") WANT("w", "f32[37]")
        "%y, %o, %s, %q = CrossEntropy(%x, %i, %w) {label_smoothing=0.1}\nreturn %y\n",
    X("[3,5,7]") IDS("[3,7]")
        "%y, %o, %s, %q = CrossEntropy(%x, %i) {reduction=\"none\", ignore_index=1}\nreturn %y\n",
    X("[7,37]") IDS("[7]") WANT("w", "f32[19,37]") WANT("b", "f32[19]") WANT("c", "f32[19]")
        "%y, %d, %e, %f = LinearCrossEntropy(%x, %w, %i, %b, %c) {label_smoothing=0.1}\nreturn %y\n",
    X("[7,37]") IDS("[7]") WANT("w", "f32[19,37]")
        "%y, %d, %e, %f = LinearCrossEntropy(%x, %w, %i) {ignore_index=1}\nreturn %y\n",
    X("[7,37]") IDS("[7]") WANT("w", "f32[37]")
        "%y, %q = NegativeLogLikelihoodLoss(%x, %i, %w)\nreturn %y\n",
    X("[3,5,7]") IDS("[3,7]")
        "%y, %q = NegativeLogLikelihoodLoss(%x, %i) {reduction=\"none\", ignore_index=1}\nreturn %y\n",
    X("[5,37]") "%p = Sigmoid(%x)\n%u = UnitInterval(%p)\n%y = Mul(%u, %x)\nreturn %y\n",
    X("[7,37]") WANT("g", "f32[37]") WANT("b", "f32[37]")
        "%y, %o, %q = LayerNormalization(%x, %g, %b) {axis=-1, epsilon=1e-5}\nreturn %y\n",
    X("[70,3,5]") "%y, %o, %q = LayerNormalization(%x) {axis=1, epsilon=1e-5}\nreturn %y\n",
    X("[70,3,5]") WANT("g", "f32[3,5]") "%y, %o = RmsNorm(%x, %g) {axis=1, epsilon=1e-5}\nreturn %y\n",
    X("[7,37]") "%y, %o = RmsNorm(%x) {axis=-1, epsilon=1e-5}\nreturn %y\n",
    X("[3,6,7,3]") WANT("g", "f32[6]") WANT("b", "f32[6]")
        "%y, %o, %q = GroupNorm(%x, %g, %b) {num_groups=2, epsilon=1e-5}\nreturn %y\n",
    X("[7,37]") "%y, %o, %q = GroupNorm(%x) {num_groups=37, epsilon=1e-5}\nreturn %y\n",
    X("[3,5,7,3]") WANT("g", "f32[5]") WANT("b", "f32[5]") IN("m", "f32[5]") IN("v", "f32[5]")
        "%y, %o, %q, %n, %u = BatchNorm(%x, %g, %b, %m, %v) {epsilon=1e-5, momentum=0.1}\n"
        "return %y\n",
    X("[3,5,7,3]") WANT("g", "f32[5]") WANT("b", "f32[5]") WANT("r", "f32[3,5,7,3]")
        "%y, %o, %q = BatchNorm(%x, %g, %b, _, _, %r)\n%z, %p, %s = BatchNorm(%y, %g, %b) {relu=1}\n"
        "return %z\n",
    X("[70,37]") WANT("g", "f32[37]")
        "%y, %o, %q = BatchNorm(%x, %g, _, _, _, %x) {relu=1}\n%z, %p, %s = BatchNorm(%y) {relu=1}\n"
        "return %z\n",
    X("[3,5,148]") WANT("r", "f32[148,37]") WANT("b", "f32[148]") WANT("h", "f32[5,37]") WANT("c", "f32[5,37]")
        "%y, %u, %v, %k, %m = LstmCells(%x, %r, %b, %h, %c)\nreturn %y, %u, %v\n",
    X("[2,67,20]") WANT("r", "f32[20,5]") WANT("h", "f32[67,5]") WANT("c", "f32[67,5]")
        "%y, %u, %v, %k, %m = LstmCells(%x, %r, _, %h, %c) {reverse=1}\nreturn %v\n",
    X("[3,5,111]") WANT("r", "f32[111,37]") WANT("b", "f32[111]") WANT("h", "f32[5,37]")
        "%y, %u, %k, %m = GruCells(%x, %r, %b, %h) {reverse=1}\nreturn %y, %u\n",
    X("[3,5,37]") WANT("r", "f32[37,37]") WANT("b", "f32[37]") WANT("h", "f32[5,37]")
        "%y, %u = RnnCells(%x, %r, %b, %h)\nreturn %y\n",
    X("[3,5,37]") WANT("r", "f32[37,37]") WANT("h", "f32[5,37]")
        "%y, %u = RnnCells(%x, %r, _, %h) {relu=1}\nreturn %u\n",
    X("[2,3,9,11]") "%y, _, %t = MaxPool(%x) {kernel_shape=[3, 2], strides=[2, 2], pads=[1, 1, 1, 1]}\n"
                    "return %y\n",
    X("[2,3,5,43]") "%y, %o, %t = MaxPool(%x) {kernel_shape=[3, 2], strides=[1, 2], pads=[1, 0, 1, 0]}\n"
                    "return %y\n",
    X("[2,3,9,11]") Y("AveragePool(%x) {kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 1, 1]}"),
    X("[2,3,9,11]") Y("AveragePool(%x) {kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1, "
                      "count_include_pad=1}"),
    X("[2,3,9,11]") Y("AdaptiveAvgPool(%x) {output_size=[4, 3]}"),
    X("[2,3,9,11]") Y("AdaptiveAvgPool(%x) {output_size=[0, 1]}"),
    X("[2,3,9,11]") Y("AdaptiveAvgPool(%x) {output_size=[2, 0]}"),

    /* rows and planes of no elements */
    X("[5,0]") IDS("[3]") Y("Gather(%x, %i)"),
    X("[4611686018427387904,0]") IDS("[3]") Y("Embedding(%x, %i)"),
    X("[7,0]") "const %at : i64[3] = [0, 2, 2]\n" Y("SegmentSum(%x, %at)"),
    X("[7,0]") IDS("[7]") WANT("w", "f32[19,0]")
        "%y, %d, %e, %f = LinearCrossEntropy(%x, %w, %i)\nreturn %y\n",
    IN("x", "f32[2,3,0]") Y("MaxPool(%x) {kernel_shape=[2], pads=[1, 1]}"),
    X("[0,3]") Y("AveragePool(%x) {kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1}"),

    /* many steps that share an arena */
    X("[5,37]") WANT("w", "f32[37,19]") WANT("b", "f32[19]") WANT("g", "f32[19]") IDS("[5]")
        "%a = MatMul(%x, %w)\n%c = Add(%a, %b)\n%d = Gelu(%c)\n%e = Dropout(%d) {p=0.1, subsequence=1}\n"
        "%f = Add(%e, %a)\n%h, %j, %l = LayerNormalization(%f, %g, %b) {axis=-1, epsilon=1e-5}\n"
        "%y, %o, %s, %q = CrossEntropy(%h, %i)\nreturn %y, %d\n",
};

#endif

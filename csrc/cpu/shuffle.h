/* Moves of lanes within and between vectors: variant part only. */
#ifndef OMC_CPU_SHUFFLE_H
#define OMC_CPU_SHUFFLE_H

#ifdef OMC_VARIANT

/* OMC_HALVINGS: DO(w, ...) for half the lanes, a quarter, and so on down to 1. OMC_SWAP(x, w):
 * lanes i and i ^ w in each other's places. OMC_ZIP_LOW, OMC_ZIP_HIGH: the first (second) halves of
 * a and b, lane by lane in turn. OMC_EVERY_SECOND: of 2 OMC_VL - 1 elements, of which a holds the
 * first OMC_VL and b the last, those at even places. */
#define OMC_SWAP(x, w) OMC_FIRST_LANES(x, OMC_SWAP_##w)
#define OMC_SWAP_8 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define OMC_SWAP_4 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11
#define OMC_SWAP_2 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13
#define OMC_SWAP_1 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define OMC_FIRST_LANES(x, ...) OMC_FIRST_LANES_(x, __VA_ARGS__)
#if defined(__clang__)
#define OMC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OMC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vmask){__VA_ARGS__})
#endif
#if OMC_VL == 16
#define OMC_HALVINGS(DO, ...) \
  DO(8, __VA_ARGS__) DO(4, __VA_ARGS__) DO(2, __VA_ARGS__) DO(1, __VA_ARGS__)
#define OMC_FIRST_LANES_(x, ...) OMC_SHUFFLE(x, x, __VA_ARGS__)
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define OMC_ZIP_HIGH(a, b) \
  OMC_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define OMC_EVERY_SECOND(a, b) \
  OMC_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31)
#elif OMC_VL == 8
#define OMC_HALVINGS(DO, ...) DO(4, __VA_ARGS__) DO(2, __VA_ARGS__) DO(1, __VA_ARGS__)
#define OMC_FIRST_LANES_(x, a, b, c, d, e, f, g, h, ...) OMC_SHUFFLE(x, x, a, b, c, d, e, f, g, h)
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define OMC_EVERY_SECOND(a, b) OMC_SHUFFLE(a, b, 0, 2, 4, 6, 9, 11, 13, 15)
#elif OMC_VL == 4
#define OMC_HALVINGS(DO, ...) DO(2, __VA_ARGS__) DO(1, __VA_ARGS__)
#define OMC_FIRST_LANES_(x, a, b, c, d, ...) OMC_SHUFFLE(x, x, a, b, c, d)
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 4, 1, 5)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 2, 6, 3, 7)
#define OMC_EVERY_SECOND(a, b) OMC_SHUFFLE(a, b, 0, 2, 5, 7)
#else
#define OMC_HALVINGS(DO, ...) DO(1, __VA_ARGS__)
#define OMC_FIRST_LANES_(x, a, b, ...) OMC_SHUFFLE(x, x, a, b)
#define OMC_ZIP_LOW(a, b) OMC_SHUFFLE(a, b, 0, 2)
#define OMC_ZIP_HIGH(a, b) OMC_SHUFFLE(a, b, 1, 3)
#define OMC_EVERY_SECOND(a, b) OMC_SHUFFLE(a, b, 0, 3)
#endif

/* Transposes OMC_VL vectors, an array: zipping the halves once per bit of the lane index. */
#define OMC_TRANSPOSE(x)                                            \
  OMC_UNROLL for (int bit_ = 1; bit_ < OMC_VL; bit_ *= 2) {         \
    __typeof__((x)[0]) y_[OMC_VL];                                  \
    OMC_UNROLL for (int i_ = 0; i_ < OMC_VL / 2; i_++) {            \
      y_[2 * i_] = OMC_ZIP_LOW((x)[i_], (x)[i_ + OMC_VL / 2]);      \
      y_[2 * i_ + 1] = OMC_ZIP_HIGH((x)[i_], (x)[i_ + OMC_VL / 2]); \
    }                                                               \
    OMC_UNROLL for (int i_ = 0; i_ < OMC_VL; i_++)(x)[i_] = y_[i_]; \
  }

#endif
#endif

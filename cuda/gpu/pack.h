/* Neighbours in memory, a few at a time. */
#ifndef OMC_GPU_PACK_H
#define OMC_GPU_PACK_H

#include "cuda/gpu/target.h"

template <typename E, int N>
struct alignas(N * sizeof(E)) omc_pack {
  E e[N];
};

/* What is moved at a time, whatever it is. */
typedef omc_pack<uint64_t, 2> omc_bytes16;

template <int N, typename E>
OMC_INLINE bool omc_is_packed(const E *at, int lanes) {
  return N == 1 || (lanes == N && (uint64_t)at % sizeof(omc_pack<E, N>) == 0);
}

template <int BYTES>
struct omc_word {
  typedef uint32_t type;
};
template <>
struct omc_word<2> {
  typedef uint16_t type;
};
template <>
struct omc_word<1> {
  typedef uint8_t type;
};

/* Neighbours that have been asked for. They stay words as memory gives them: who takes an element
 * waits for it, and a thread may ask for more packs before. */
template <typename E, int N>
struct omc_loaded {
  typedef typename omc_word<N * sizeof(E)>::type word;
  enum { WORDS = N * sizeof(E) / sizeof(word) };
  union {
    E e[N];
    word words[WORDS];
  };
  OMC_METHOD E operator[](int l) const { return e[l]; }
};

/* The first `lanes` of N neighbours, the others 0, in one access if they are all there and aligned.
 */
template <typename E, int N>
OMC_INLINE void omc_load(omc_loaded<E, N> &to, const E *from, int lanes) {
  typedef omc_loaded<E, N> loaded;
  if (omc_is_packed<N>(from, lanes)) {
    typedef omc_pack<typename loaded::word, loaded::WORDS> words;
    const words pack = *(const words *)from;
#pragma unroll
    for (int w = 0; w < loaded::WORDS; w++) to.words[w] = pack.e[w];
  } else {
#pragma unroll
    for (int l = 0; l < N; l++) to.e[l] = l < lanes ? from[l] : E{};
  }
}
template <typename E, int N>
OMC_INLINE void omc_store(E *to, const E (&from)[N], int lanes) {
  if (omc_is_packed<N>(to, lanes)) {
    omc_pack<E, N> pack;
#pragma unroll
    for (int l = 0; l < N; l++) pack.e[l] = from[l];
    *(omc_pack<E, N> *)to = pack;
  } else {
#pragma unroll
    for (int l = 0; l < N; l++)
      if (l < lanes) to[l] = from[l];
  }
}

#endif

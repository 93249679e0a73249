/* Instruction sets that kernels are compiled for, each containing those before it. */
#ifndef OMC_BASE_ISA_H
#define OMC_BASE_ISA_H

typedef enum { OMC_ISA_BASE, OMC_ISA_AVX2, OMC_ISA_AVX512, OMC_N_ISA } omc_isa;

/* The names by which users know them, in that order. */
#define OMC_ISA_NAMES "base", "avx2", "avx512"

#endif

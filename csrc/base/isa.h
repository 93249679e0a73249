/* Instruction sets that kernels are compiled for, each containing those before it. */
#ifndef OMC_BASE_ISA_H
#define OMC_BASE_ISA_H

/* The list: ISA(name by which users know it, NAME, ...) for each. setup.py has the flags of each.
 * From avx512bf16 on they have instructions for matrix products of bf16, amxfp16 of f16 too, and
 * nothing else is compiled for them. */
#define OMC_ISAS(ISA, ...)                 \
  ISA(base, BASE, __VA_ARGS__)             \
  ISA(avx2, AVX2, __VA_ARGS__)             \
  ISA(avx512, AVX512, __VA_ARGS__)         \
  ISA(avx512bf16, AVX512BF16, __VA_ARGS__) \
  ISA(amx, AMX, __VA_ARGS__) ISA(amxfp16, AMXFP16, __VA_ARGS__)

#define OMC_ISA_ID_(name, NAME, ...) OMC_ISA_##NAME,
typedef enum { OMC_ISAS(OMC_ISA_ID_, ) OMC_N_ISA } omc_isa;

#define OMC_ISA_TEXT_(name, NAME, ...) #name,
#define OMC_ISA_NAMES OMC_ISAS(OMC_ISA_TEXT_, )

#endif

/* Runs a file once, for tests: run MODEL INPUTS OUTPUTS [SEED]. The inputs of evaluation are taken
 * from the file INPUTS, by name, and what comes of them is written to OUTPUTS; with a seed it is a
 * step of training without an update. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/safetensors.h"
#include "train/trainer.h"

enum { MOST = 16 };

static void check(omc_status status) {
  if (status == OMC_OK) return;
  (void)fprintf(stderr, "%s: %s\n", omc_status_text(status), omc_status_detail());
  exit(1);
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  omc_trainer *trainer;
  omc_arena arena;
  omc_safetensors given;
  const omc_mode mode = argc > 4 ? OMC_TRAINING : OMC_EVALUATION;
  check(omc_trainer_open(argv[1], &trainer));
  omc_arena_init(&arena, omc_default_allocator());
  check(omc_safetensors_read(argv[2], &arena, &given));

  omc_tensor inputs[MOST] = {{NULL, NULL}};
  for (uint32_t i = 0; i < omc_trainer_n_inputs(trainer, mode) && i < MOST; i++)
    for (uint32_t k = 0; k < given.n_tensors; k++)
      if (strcmp(given.tensors[k].name, omc_trainer_input(trainer, mode, i, NULL)) == 0)
        inputs[i] = (omc_tensor){(void *)(uintptr_t)given.tensors[k].data, &given.tensors[k].type};
  const omc_tensor *outputs;
  if (mode == OMC_TRAINING) {
    omc_trainer_seed(trainer, strtoull(argv[4], NULL, 10));
    check(omc_trainer_step(trainer, inputs, NULL, &outputs));
  } else {
    check(omc_trainer_evaluate(trainer, inputs, &outputs));
  }

  const uint32_t n = omc_trainer_n_outputs(trainer, mode);
  omc_named_tensor named[MOST];
  for (uint32_t k = 0; k < n && k < MOST; k++) {
    named[k] = (omc_named_tensor){omc_trainer_output(trainer, mode, k), *outputs[k].type,
                                  outputs[k].data, 0};
    check(omc_type_bytes(&named[k].type, &named[k].bytes));
  }
  check(omc_safetensors_write(argv[3], &(omc_safetensors){.tensors = named, .n_tensors = n}));
  omc_arena_deinit(&arena);
  omc_trainer_close(trainer);
  return 0;
}

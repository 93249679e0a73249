/* Trains a file of ortmodule_c.artifacts, without Python:
 *
 *   train MODEL DATA BATCH EPOCHS [LR_FACTOR]
 *
 * DATA is a safetensors file with a tensor for each input of the model in training, by its name;
 * along the first axis are samples, of which BATCH at a time are a batch. The model is written back
 * after each epoch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/safetensors.h"
#include "train/trainer.h"

enum { MOST_INPUTS = 16 };

static void check(omc_status status) {
  if (status == OMC_OK) return;
  (void)fprintf(stderr, "%s: %s\n", omc_status_text(status), omc_status_detail());
  exit(1);
}

static void refuse(const char *what, const char *name) {
  (void)fprintf(stderr, "%s '%s'\n", what, name);
  exit(2);
}

/* The tensors of the model's inputs, in their order; the number of samples. */
static int64_t find_data(const omc_trainer *trainer, const omc_safetensors *file,
                         const omc_named_tensor **out) {
  int64_t samples = -1;
  const uint32_t n = omc_trainer_n_inputs(trainer, OMC_TRAINING);
  if (n == 0 || n > MOST_INPUTS) refuse("expected 1 to 16 inputs of", "the model");
  for (uint32_t i = 0; i < n; i++) {
    const char *const name = omc_trainer_input(trainer, OMC_TRAINING, i, NULL);
    out[i] = NULL;
    for (uint32_t k = 0; k < file->n_tensors; k++)
      if (strcmp(file->tensors[k].name, name) == 0) out[i] = &file->tensors[k];
    if (!out[i] || out[i]->type.shape.rank < 1) refuse("the data lack samples of", name);
    const int64_t here = out[i]->type.shape.dims[0];
    if (samples >= 0 && here != samples) refuse("another number of samples of", name);
    samples = here;
  }
  return samples;
}

/* One pass over the data; the mean of the losses. */
static double run_epoch(omc_trainer *trainer, const omc_named_tensor *const *data, int64_t samples,
                        int64_t batch) {
  const uint32_t n = omc_trainer_n_inputs(trainer, OMC_TRAINING);
  omc_type types[MOST_INPUTS];
  omc_tensor inputs[MOST_INPUTS];
  double sum = 0;
  int64_t steps = 0;
  for (int64_t at = 0; at < samples; at += batch, steps++) {
    const int64_t size = samples - at < batch ? samples - at : batch;
    for (uint32_t i = 0; i < n; i++) {
      types[i] = data[i]->type;
      types[i].shape.dims[0] = size;
      const size_t bytes = data[i]->bytes / (size_t)samples;
      inputs[i] = (omc_tensor){(char *)(uintptr_t)data[i]->data + (size_t)at * bytes, &types[i]};
    }
    double loss;
    check(omc_trainer_step(trainer, inputs, &loss, NULL));
    check(omc_trainer_update(trainer));
    sum += loss;
  }
  return steps ? sum / (double)steps : 0;
}

int main(int argc, char **argv) {
  if (argc < 5 || argc > 6) {
    (void)fprintf(stderr, "usage: %s MODEL DATA BATCH EPOCHS [LR_FACTOR]\n", argv[0]);
    return 2;
  }
  const int64_t batch = strtoll(argv[3], NULL, 10), epochs = strtoll(argv[4], NULL, 10);
  if (batch < 1 || epochs < 1) refuse("expected a number above 0, got", argv[batch < 1 ? 3 : 4]);
  omc_trainer *trainer;
  check(omc_trainer_open(argv[1], &trainer));
  if (argc == 6) check(omc_trainer_scale_learning_rate(trainer, strtod(argv[5], NULL)));

  omc_arena arena;
  omc_arena_init(&arena, omc_default_allocator());
  omc_safetensors file;
  const omc_named_tensor *data[MOST_INPUTS];
  check(omc_safetensors_read(argv[2], &arena, &file));
  const int64_t samples = find_data(trainer, &file, data);

  for (int64_t epoch = 0; epoch < epochs; epoch++) {
    (void)printf("%lld %.9g\n", (long long)epoch, run_epoch(trainer, data, samples, batch));
    check(omc_trainer_save(trainer, argv[1]));
  }
  omc_arena_deinit(&arena);
  omc_trainer_close(trainer);
  return 0;
}

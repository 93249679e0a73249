/* Training where there is no Python: a model that ortmodule_c.artifacts has written is trained,
 * evaluated and written again. A program needs this header and those that it includes.
 *
 *   omc_trainer *trainer;
 *   omc_trainer_open("model.safetensors", &trainer);
 *   const omc_tensor batch[] = {{pixels, &pixels_type}, {labels, &labels_type}};
 *   for (each batch) {
 *     omc_trainer_step(trainer, batch, &loss, NULL);
 *     omc_trainer_update(trainer);
 *   }
 *   omc_trainer_save(trainer, "model.safetensors");
 *   omc_trainer_close(trainer);
 *
 * Each of these but omc_trainer_close returns a status; omc_status_text and omc_status_detail
 * (base/status.h) say what was wrong, and the next good call works. Any that returns one may fail
 * with OMC_ENOMEM besides what is said below. A trainer is used by one thread at a time; it
 * computes on as many as OpenMP has (OMP_NUM_THREADS). */
#ifndef OMC_TRAIN_TRAINER_H
#define OMC_TRAIN_TRAINER_H

#include "base/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct omc_trainer omc_trainer;

typedef enum { OMC_TRAINING, OMC_EVALUATION, OMC_N_MODE } omc_mode;

/* Reads a file. OMC_EINVALID: it cannot be read, or is of another kind; OMC_EPARSE: it is damaged;
 * OMC_EUNSUPPORTED: it has an optimizer, an op or a dtype that is not known here. The caller owns
 * *out, which is NULL after a failure. */
OMC_API omc_status omc_trainer_open(const char *path, omc_trainer **out) OMC_MUST_USE;
OMC_API void omc_trainer_close(omc_trainer *trainer); /* NULL is accepted */

/* Writes parameters, buffers and what the optimizer keeps, to be opened again, or read in Python.
 * What was at `path` stays until that is done. Gradients that no update has used are not written.
 * OMC_EINVALID: it cannot be written there. */
OMC_API omc_status omc_trainer_save(const omc_trainer *trainer, const char *path) OMC_MUST_USE;

/* How many tensors a mode takes and gives; a file may lack a mode, which then takes and gives none.
 */
OMC_API uint32_t omc_trainer_n_inputs(const omc_trainer *trainer, omc_mode mode);
OMC_API uint32_t omc_trainer_n_outputs(const omc_trainer *trainer, omc_mode mode);

/* The name of one of them; of an input *type too, with -1 for a size that is open. Borrowed from
 * the trainer; i must be below the number of them. */
OMC_API const char *omc_trainer_input(const omc_trainer *trainer, omc_mode mode, uint32_t i,
                                      omc_type *type);
OMC_API const char *omc_trainer_output(const omc_trainer *trainer, omc_mode mode, uint32_t i);

/* Runs forward in training, its first output being the loss, and backward, whose gradients are
 * added to those there are. inputs: dense tensors, as many as omc_trainer_n_inputs says. `loss` and
 * `outputs` may be NULL; *outputs is an array of omc_trainer_n_outputs, borrowed until the next
 * call in this mode. OMC_ESHAPE and OMC_EDTYPE name an input that does not fit, as where an open
 * size is one for which the module in Python would have another graph (0 and 1, mostly);
 * OMC_EINVALID: the file lacks this mode, an input has no type, or elements and no data, or lies in
 * an output of an earlier call, or the loss is not one float; OMC_EINDEX: an index of an input is
 * outside of what it is for. Gradients are then as they were. */
OMC_API omc_status omc_trainer_step(omc_trainer *trainer, const omc_tensor *inputs, double *loss,
                                    const omc_tensor **outputs) OMC_MUST_USE;

/* One step of the optimizer for the parameters that have gradients, which are dropped after it.
 * Their norm, all together, is clipped to the optimizer's max_grad_norm if it has one.
 * OMC_EINVALID: the file has no optimizer. */
OMC_API omc_status omc_trainer_update(omc_trainer *trainer) OMC_MUST_USE;

/* Drops gradients. */
OMC_API void omc_trainer_drop_gradients(omc_trainer *trainer);

/* Runs forward in evaluation; otherwise as omc_trainer_step. */
OMC_API omc_status omc_trainer_evaluate(omc_trainer *trainer, const omc_tensor *inputs,
                                        const omc_tensor **outputs) OMC_MUST_USE;

/* Learning rates are from now on those of the file times this; at first 1. OMC_EINVALID: it is
 * below 0 or no number. */
OMC_API omc_status omc_trainer_scale_learning_rate(omc_trainer *trainer,
                                                   double factor) OMC_MUST_USE;

/* What dropout draws from, with the number of the step since; at first 0, of a file that was saved
 * too. */
OMC_API void omc_trainer_seed(omc_trainer *trainer, uint64_t seed);

/* How many parameters and buffers the model has, and the name of one; i must be below that. */
OMC_API uint32_t omc_trainer_n_tensors(const omc_trainer *trainer);
OMC_API const char *omc_trainer_tensor_name(const omc_trainer *trainer, uint32_t i);

/* A parameter or buffer by its name in the module's state_dict (of a tied one the first of its
 * names), to be read, or written between calls. Borrowed from the trainer. OMC_EINVALID: there is
 * none. */
OMC_API omc_status omc_trainer_tensor(const omc_trainer *trainer, const char *name,
                                      omc_tensor *out) OMC_MUST_USE;

/* What steps have added up to the gradient of a parameter, to be read, or written before an update.
 * Borrowed from the trainer until the next call. OMC_EINVALID: there is no such tensor, or it has
 * no gradient, as before a step, after an update, and where it is not trained. */
OMC_API omc_status omc_trainer_gradient(const omc_trainer *trainer, const char *name,
                                        omc_tensor *out) OMC_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif

#include "cuda/torch_call.h"

omc_status omc_torch_begin(const omc_cuda_device *device, const char *node, void *queue,
                           omc_torch_call *out) {
  void *current;
  *out = (omc_torch_call){.device = device, .node = node};
  OMC_TORCH_TRY(node, aoti_torch_get_current_cuda_stream, device->ordinal, &current);
  if (current == queue) return OMC_OK;
  OMC_FAIL(EUNSUPPORTED, "'%s' is an op of PyTorch's, which works in another stream", node);
}

/* PyTorch's number of it. */
static int32_t number_of(omc_dtype dtype) {
  const omc_cuda_api *api = omc_cuda_api_get();
  int32_t (*const numbers[OMC_N_DTYPE])(void) = {[OMC_F32] = api->aoti_torch_dtype_float32,
                                                 [OMC_F64] = api->aoti_torch_dtype_float64,
                                                 [OMC_F16] = api->aoti_torch_dtype_float16,
                                                 [OMC_BF16] = api->aoti_torch_dtype_bfloat16};
  return numbers[dtype]();
}

omc_status omc_torch_lend(omc_torch_call *call, const void *data, omc_dtype dtype,
                          const omc_shape *shape, const int64_t *strides, void **out) {
  OMC_TORCH_TRY(call->node, aoti_torch_create_tensor_from_blob, (void *)(uintptr_t)data,
                shape->rank, shape->dims, strides, 0, number_of(dtype),
                omc_cuda_api_get()->aoti_torch_device_type_cuda(), call->device->ordinal, out);
  call->tensors[call->n++] = *out;
  return OMC_OK;
}

void **omc_torch_result(omc_torch_call *call) { return &call->tensors[call->n++]; }

omc_status omc_torch_read(const omc_torch_call *call, void *result, const void **data,
                          const int64_t **strides) {
  void *elements;
  int64_t *steps;
  OMC_TORCH_TRY(call->node, aoti_torch_get_data_ptr, result, &elements);
  OMC_TORCH_TRY(call->node, aoti_torch_get_strides, result, &steps);
  *data = elements, *strides = steps;
  return OMC_OK;
}

void omc_torch_end(omc_torch_call *call) {
  for (int i = 0; i < call->n; i++)
    if (call->tensors[i]) omc_cuda_api_get()->aoti_torch_delete_tensor_object(call->tensors[i]);
}

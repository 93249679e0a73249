/* The DLPack 1.x binary interface, declared from its specification: structs by value, the
 * exchange table that torch.Tensor carries as `__dlpack_c_exchange_api__`, and nothing else. */
#ifndef OMC_PYTHON_DLPACK_H
#define OMC_PYTHON_DLPACK_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define OMC_DL_MAJOR 1

typedef struct DLPackVersion {
  uint32_t major, minor;
} DLPackVersion;

typedef struct DLDevice {
  int32_t device_type, device_id;
} DLDevice;

typedef struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;

typedef struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out,
                                  void *error_ctx,
                                  void (*set_error)(void *error_ctx, const char *kind,
                                                    const char *message));
  int (*managed_tensor_from_py_object_no_sync)(void *py_object, DLManagedTensorVersioned **out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *tensor,
                                             void **out_py_object);
  int (*dltensor_from_py_object_no_sync)(void *py_object, DLTensor *out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} DLPackExchangeAPI;

static_assert(sizeof(void *) != 8 || sizeof(DLTensor) == 48, "DLTensor layout");
static_assert(sizeof(void *) != 8 || sizeof(DLManagedTensorVersioned) == 80,
              "DLManagedTensorVersioned layout");
static_assert(sizeof(void *) != 8 || offsetof(DLPackExchangeAPI, managed_tensor_allocator) == 16,
              "exchange table layout");

#endif

// Memory of results: fresh tensors, large ones on huge pages.
#pragma once

#include <ATen/ops/empty.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mindspeed {

// An uninitialised contiguous tensor. The first touch of a large one costs a page fault per page, which is more than the
// work of an operator that streams: on huge pages, where the system grants them, there are 512 times fewer.
inline at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions &options) {
  const at::Tensor out = at::empty(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + out.nbytes()) / page * page;
  if (last > first)
    madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE); // a refusal changes nothing but speed
#endif
  return out;
}

} // namespace mindspeed

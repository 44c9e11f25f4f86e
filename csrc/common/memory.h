// Memory of results: fresh tensors, large ones on huge pages.
#pragma once

#include <ATen/ops/empty.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace mindspeed {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Ask for huge pages wherever they fit into the memory. A refusal changes nothing but speed.
inline void prefer_huge_pages(const void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const int64_t begin = reinterpret_cast<int64_t>(memory);
  const int64_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = (begin + bytes) / kHugePage * kHugePage;
  if (last > first)
    madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

// An uninitialised contiguous tensor. The first touch of a large one costs a page fault per page, which is more than the
// work of an operator that streams: on huge pages, where the system grants them, there are 512 times fewer.
inline at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions &options) {
  const at::Tensor out = at::empty(sizes, options);
  prefer_huge_pages(out.const_data_ptr(), static_cast<int64_t>(out.nbytes()));
  return out;
}

} // namespace mindspeed

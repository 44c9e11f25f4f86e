// Memory of results.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace mindspeed {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Ask for huge pages wherever they fit into the memory. A refusal changes nothing but speed.
void prefer_huge_pages(const void *memory, int64_t bytes);

// The size of the last cache that a core has a share of; 32 MiB where nothing says it. It is the kernel's number: on a machine
// with several such caches that of the C library (sysconf) can be their sum.
int64_t last_cache_bytes();

// An uninitialised contiguous tensor on the CPU. The first touch of large memory costs a page fault per page, which is
// more than the work of an operator that streams. So that of large results comes from a stock of blocks that earlier
// results have left, and goes back there when the last tensor on it does.
at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions &options);

} // namespace mindspeed

// Reductions of one range over the inputs of all ranks, with the bits of Gloo's ring.
//
// A collective library may add in any order, and each order has its own rounding. This is the one
// of Gloo's ring all-reduce (gloo/allreduce.cc, gloo/reduce.cc): the data is cut into as many
// chunks as there are ranks, and chunk c is summed from rank c-1 down to rank c, around the ring.
#pragma once

#include <span>

#include "hccl_types.hpp"

namespace hccl {

// Whether the documentation of HcclAllReduce lists this combination for Atlas A2 and A3
// (no product of int16 and bfloat16, no reduction of unsigned integers and of float64).
bool is_reducible(DataType type, Reduction reduction);

// Elements per chunk of an all-reduce of `count` elements over `num_ranks` ranks.
size_t chunk_of_all_reduce(size_t count, size_t element_bytes, size_t num_ranks);

// Likewise of a reduce to one rank; it differs from 1 MiB per segment upwards.
size_t chunk_of_reduce(size_t count, size_t element_bytes, size_t num_ranks);

struct Range {
  size_t begin;  // first element, counted in the whole data
  size_t count;
};

// Reduce `range` into `output`.
//
// `inputs` are the ranks' parts of that range, in the order of ranks. `output` may be one of them.
void reduce_range(std::span<const void* const> inputs, void* output, Range range,
                  size_t chunk_elements, DataType type, Reduction reduction);

}  // namespace hccl

// How the ranks of a communicator find each other: all of them call the process that made the root
// info, which answers each with the addresses of all.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hccl_links.hpp"
#include "hccl_types.hpp"

namespace hccl {

// What root info says, in the first of its bytes.
struct Root {
  std::string address;
  std::string secret;
  std::string identifier;  // the communicator's name, where its configuration gives none
};

std::optional<Root> parse_root(const RootInfo& info);

// Begins to listen for the ranks, in a thread that ends once they came or `timeout_s` passed.
// Throws std::system_error.
RootInfo begin_root(int device, int64_t timeout_s);

// The members in the order of ranks; where they did not all come, an empty list, and `error` says
// who is missing.
std::vector<Member> meet(const Root& root, size_t num_ranks, size_t rank, const Member& self,
                         int64_t timeout_s, std::string& error);

}  // namespace hccl

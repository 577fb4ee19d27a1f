// Where this process listens for the links of all its communicators.
#pragma once

#include <functional>
#include <string>

#include "hccl_socket.hpp"

namespace hccl {

// Takes a connection of a rank that named the communicator; the secret has to be checked.
using Accepted = std::function<void(Descriptor fd, size_t rank, const std::string& secret)>;

// The address of this process; it listens from the first call on.
const std::string& listening_address();

// Connections that came before wait for the communicator to be made here.
void accept_links(const std::string& communicator, Accepted accepted);
void refuse_links(const std::string& communicator);

// Dials a member and names the communicator.
Descriptor dial_link(const std::string& address, const std::string& communicator,
                     const std::string& secret, size_t rank);

}  // namespace hccl

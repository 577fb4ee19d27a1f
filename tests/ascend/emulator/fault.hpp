// Faults that are armed, and strike what runs on a device.
#pragma once

#include <string>

#include "errors.hpp"

namespace ascend {

// What a fault strikes: whatever runs next, operators alone, or communication alone.
enum class Site { kWork, kOperator, kCommunication };

// The armed fault of the device that is due at this place: its code, with its text set by
// `set_error_message`; 0 where there is none. One that never ends returns when it is interrupted.
Error strike(int32_t device, Site site, const Interrupt& interrupt);

// Whether a fault of this kind is due: one that the caller knows how to be struck by itself.
bool take_fault(int32_t device, const std::string& kind);

// Whether the device is to have no memory left.
bool is_out_of_memory(int32_t device);

// Arms, or clears, what a line says; ../README.md has the language. Returns what is wrong with it.
std::string command_fault(const std::string& line);

// Answers such lines on $ASCEND_EMULATOR_FAULTS/<pid>.sock, where the variable is set.
void serve_faults();

}  // namespace ascend

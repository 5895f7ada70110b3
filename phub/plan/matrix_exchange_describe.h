// The ways of matrices (matrix_exchange.h) as text.
#pragma once

#include <span>
#include <string>

#include "transport/control/job_spec.h"
#include "transport/control/layer_computing.h"
#include "transport/control/matrix_exchange.h"

namespace phub {

// Describes the ways for people.
std::string describe(const Exchanges& exchanges, const JobSpec& spec, const ExchangeInputs& inputs,
                     std::span<const LayerComputing> layers = {});

}  // namespace phub

// `phub doctor`: what this host lacks for phub.
#pragma once

namespace CLI {
class App;
}

namespace phub {

// Its callback throws Error when there are findings of severity error.
void add_doctor_command(CLI::App& app);

}  // namespace phub

// What of Boost.Asio and Boost.Beast needs no template: compiled here once, not in each file that
// uses them.
#include <boost/asio/impl/src.hpp>
#include <boost/asio/ssl/impl/src.hpp>
#include <boost/beast/src.hpp>

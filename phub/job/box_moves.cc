#include "phub/job/box_moves.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

bool is_of(const CopyPlace& place, const CopyPlace& what) {
  return place.state == what.state && (what.state > 0 || place.round == what.round);
}

[[noreturn]] void fail_no_piece(const CopyPlace& place, uint64_t bytes) {
  fail(ErrorCode::kInvalid,
       "{} bytes of {} {} from byte {} on are no piece that moves between this box and its server "
       "now",
       bytes, place.state > 0 ? "state" : "round", place.state > 0 ? place.state : place.round,
       place.offset);
}

}  // namespace

void BoxMoves::begin(uint32_t box, Direction direction, const CopyPlace& what, SavedImage image) {
  moves_.push_back({.box = box, .direction = direction, .what = what, .image = std::move(image)});
}

void BoxMoves::end(const CopyPlace& what) {
  std::erase_if(moves_, [&what](const Move& move) { return is_of(move.what, what); });
}

const BoxMoves::Move* BoxMoves::find(uint32_t box, Direction direction,
                                     const CopyPlace& what) const {
  const auto at = std::ranges::find_if(moves_, [&](const Move& move) {
    return move.box == box && move.direction == direction && is_of(move.what, what);
  });
  return at == moves_.end() ? nullptr : &*at;
}

bool BoxMoves::is_here(uint32_t box, const CopyPlace& what) const {
  const Move* const move = find(box, Direction::kReceive, what);
  return move != nullptr && move->here == move->image.bytes();
}

PartBytes BoxMoves::read(uint32_t box, const CopyPlace& place) const {
  const Move* const move = find(box, Direction::kSend, place);
  const uint64_t bytes = move ? move->image.piece_bytes(place.offset, kCopyPieceBytes) : 0;
  if (bytes == 0) fail_no_piece(place, bytes);
  PartBytes piece{.bytes = std::string(bytes, '\0')};
  move->image.read(place.offset, std::as_writable_bytes(std::span(piece.bytes)));
  return piece;
}

void BoxMoves::check(uint32_t box, const CopyPlace& place, uint64_t bytes) const {
  const Move* const move = find(box, Direction::kReceive, place);
  const bool is_next = move != nullptr && place.offset <= move->here;
  if (is_next && bytes > 0 && bytes == move->image.piece_bytes(place.offset, kCopyPieceBytes)) {
    return;
  }
  fail_no_piece(place, bytes);
}

void BoxMoves::write(uint32_t box, const CopyPlace& place, std::string_view piece) {
  check(box, place, piece.size());
  Move& move = const_cast<Move&>(*find(box, Direction::kReceive, place));
  if (place.offset < move.here) return;
  move.image.write(place.offset, std::as_bytes(std::span(piece)));
  move.here += piece.size();
}

}  // namespace phub

#include "commit/dense_slots.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/checksum.h"
#include "base/error.h"
#include "base/parallel.h"

namespace holdfast {
namespace {

constexpr std::size_t copy_chunk_bytes = 128 * 1024;  // stays in L2 between its checksum and its copy

// Copies past the caches: nobody reads the copy soon, and what was there before need not be read at all. `to` is a
// multiple of 16.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  for (; bytes >= 16; to += 16, from += 16, bytes -= 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  _mm_sfence();
#endif
  std::memcpy(to, from, bytes);
}

// Whether a header that does not hold here would hold in the pool that it names, or in one of before version 4.
bool is_of_another_pool(const format::DenseHeader& header, const Identity& identity) {
  const auto uuid = std::to_array(header.uuid);
  const Identity named = uuid == Uuid{} ? Identity() : Identity(uuid);
  return named.uuid() != identity.uuid() && header.crc == crc_of(header, named.seed());
}

std::size_t tensors_offset(std::uint64_t structure_bytes) {
  return format::align_up(structure_bytes, format::line_bytes);
}

}  // namespace

DenseSlots::DenseSlots(Medium& medium, std::array<std::unique_ptr<File>, 2> slots, const Identity& identity)
    : medium_(medium), slots_(std::move(slots)), identity_(identity) {}

std::size_t DenseSlots::payload_bytes(const format::DenseHeader& header) {
  return tensors_offset(header.structure_bytes) + header.tensors_bytes;
}

std::optional<format::DenseHeader> DenseSlots::read(std::size_t slot, bool clean) {
  bool& damaged = damaged_[slot];
  const File& file = *slots_[slot];
  const auto refuse = [&](const char* reason) -> std::optional<format::DenseHeader> {
    reasons_[slot] = reason;
    return std::nullopt;
  };
  damaged = true;
  if (file.size() < format::dense_payload_offset) return refuse("the file is shorter than its header block");
  format::DenseHeader header;
  std::memcpy(&header, file.data(), sizeof(header));
  damaged = clean && (header.magic != 0 || header.crc != 0);  // in a pool that was in use, a header may be torn
  if (header.magic == 0 && header.crc == 0) return refuse("empty");
  torn_[slot] = header.magic != format::dense_magic || header.crc != crc_of(header, identity_.seed());
  if (header.magic != format::dense_magic) return refuse("not a dense slot");
  if (torn_[slot] && is_of_another_pool(header, identity_)) {
    damaged = true;
    return refuse("this file belongs to another pool: put this pool's own back");
  }
  if (torn_[slot]) return refuse("the header's checksum does not hold");
  damaged = true;
  const std::size_t room = file.size() - format::dense_payload_offset;
  if (header.structure_bytes > room || header.tensors_bytes > room || payload_bytes(header) > room) {
    return refuse("the payload is longer than the file");
  }
  if (header.payload_crc !=
      crc32c(identity_.seed(), file.data() + format::dense_payload_offset, payload_bytes(header))) {
    return refuse("the payload's checksum does not hold");
  }
  damaged = false;
  reasons_[slot].clear();
  return header;
}

void DenseSlots::load(std::uint64_t epoch, std::uint64_t step, bool clean) {
  pending_.reset();
  torn_ = {};
  for (std::size_t i = 0; i < 2; ++i) valid_[i] = read(i, clean);
  for (std::size_t i = 0; i < 2; ++i) {
    if (damaged_[i]) throw Error(ErrorKind::corrupted, slots_[i]->place(0) + ": " + reasons_[i]);
    if (!valid_[i] || valid_[i]->step <= step) continue;
    if (valid_[i]->epoch == epoch) {
      throw Error(ErrorKind::corrupted, slots_[i]->name() + ": holds step " + std::to_string(valid_[i]->step) +
                                            ", but the newest commit record that holds its checksum is of step " +
                                            std::to_string(step));
    }
    valid_[i].reset();
    reasons_[i] = "of a step that was rolled back";
  }
}

void DenseSlots::persist_valid() {
  for (std::size_t i = 0; i < 2; ++i) {
    if (!valid_[i]) continue;
    write_header(i, *valid_[i]);
    medium_.persist(slots_[i]->data(), format::dense_payload_offset + payload_bytes(*valid_[i]));
  }
}

void DenseSlots::clear_torn() {
  for (std::size_t i = 0; i < 2; ++i) {
    if (torn_[i]) clear_header(i);
  }
  torn_ = {};
}

std::vector<StepMark> DenseSlots::marks() const {
  std::vector<StepMark> marks;
  for (const auto& header : valid_) {
    if (header) marks.push_back({header->step, header->cursor, header->row_updates});
  }
  return marks;
}

void DenseSlots::forget_after(std::uint64_t step) {
  for (std::size_t i = 0; i < 2; ++i) {
    if (!valid_[i] || valid_[i]->step <= step) continue;
    valid_[i].reset();
    torn_[i] = true;
  }
}

std::optional<std::uint64_t> DenseSlots::newest_step() const {
  std::optional<std::uint64_t> step;
  for (const auto& header : valid_) {
    if (header && (!step || header->step >= *step)) step = header->step;
  }
  return step;
}

std::optional<DenseState> DenseSlots::newest(std::uint64_t step) const {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < 2; ++i) {
    if (!valid_[i] || valid_[i]->step > step) continue;
    if (!best || valid_[i]->step > valid_[*best]->step ||
        (valid_[i]->step == valid_[*best]->step && valid_[i]->epoch > valid_[*best]->epoch)) {
      best = i;
    }
  }
  if (!best) return std::nullopt;
  const format::DenseHeader& header = *valid_[*best];
  const std::byte* payload = slots_[*best]->data() + format::dense_payload_offset;
  return DenseState{header,
                    {payload, header.structure_bytes},
                    {payload + tensors_offset(header.structure_bytes), header.tensors_bytes}};
}

std::size_t DenseSlots::idle_slot() const {
  if (!valid_[0]) return 0;
  if (!valid_[1]) return 1;
  const bool first_is_newer =
      valid_[0]->step != valid_[1]->step ? valid_[0]->step > valid_[1]->step : valid_[0]->epoch > valid_[1]->epoch;
  return first_is_newer ? 1 : 0;
}

void DenseSlots::stage(std::uint64_t epoch, const StepMark& mark, std::span<const std::byte> structure,
                       std::span<const DenseTensor> tensors, std::size_t tensors_bytes) {
  const std::size_t slot = idle_slot();
  File& file = *slots_[slot];
  format::DenseHeader header{};
  header.magic = format::dense_magic;
  if (identity_.uuid()) std::ranges::copy(*identity_.uuid(), header.uuid);
  header.epoch = epoch;
  header.step = mark.step;
  header.cursor = mark.cursor;
  header.row_updates = mark.row_updates;
  header.structure_bytes = structure.size();
  header.tensors_bytes = tensors_bytes;

  const std::size_t payload = payload_bytes(header);
  const std::size_t needed = format::align_up(format::dense_payload_offset + payload, format::block_bytes);
  const bool in_place = is_staged_in_place();
  valid_[slot].reset();
  if (in_place) clear_header(slot);
  if (file.size() < needed) {
    const std::size_t had = file.size();
    file.resize(needed);
    try {
      file.allocate(had, needed - had);
    } catch (...) {
      file.resize(had);
      throw;
    }
  }

  const std::size_t padded = needed - format::dense_payload_offset;
  if (!in_place) {
    if (staging_.size() < padded) staging_ = SectorBuffer(padded);
    std::memset(staging_.data() + payload, 0, padded - payload);
  }
  std::byte* target = in_place ? file.data() + format::dense_payload_offset : staging_.data();
  const std::size_t gap = tensors_offset(structure.size()) - structure.size();
  PartsChecksum checksum(payload, identity_.seed());  // what lies between the parts is zeros
  std::memcpy(target, structure.data(), structure.size());
  checksum.add(0, structure.data(), structure.size());
  std::memset(target + structure.size(), 0, gap);
  std::byte* target_tensors = target + structure.size() + gap;

  struct Copy {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
  };
  std::vector<Copy> copies;
  std::size_t end = 0;
  for (const DenseTensor& tensor : tensors) {
    std::memset(target_tensors + end, 0, tensor.offset - end);
    end = tensor.offset + tensor.bytes;
    for (std::size_t at = 0; at < tensor.bytes; at += copy_chunk_bytes) {
      copies.push_back({static_cast<const std::byte*>(tensor.data) + at, target_tensors + tensor.offset + at,
                        std::min(copy_chunk_bytes, tensor.bytes - at)});
    }
  }
  std::memset(target_tensors + end, 0, tensors_bytes - end);
  parallel_for(copies.size(), [&](std::size_t i) {
    const Copy& copy = copies[i];
    checksum.add(static_cast<std::size_t>(copy.to - target), copy.from, copy.bytes);
    copy_streaming(copy.to, copy.from, copy.bytes);
  });
  header.payload_crc = checksum.value();
  pending_ = Pending{slot, header, in_place ? padded : 0};
}

// A dialled medium is no memory to stage in, whatever it really is.
bool DenseSlots::is_staged_in_place() const {
  return medium_.level() == format::Level::process && medium_.dial() == nullptr;
}

void DenseSlots::clear_header(std::size_t slot) { write_header(slot, {}); }

void DenseSlots::write_header(std::size_t slot, const format::DenseHeader& header) {
  alignas(format::sector_bytes) std::array<std::byte, format::sector_bytes> sector{};
  static_assert(sizeof(header) <= sector.size());
  std::memcpy(sector.data(), &header, sizeof(header));
  slots_[slot]->write(0, sector.data(), sector.size());
  medium_.persist(slots_[slot]->data(), sector.size());
}

void DenseSlots::allocate() {
  for (const auto& slot : slots_) slot->allocate(0, slot->size());
}

void DenseSlots::sync() {
  for (const auto& slot : slots_) slot->sync();
}

bool DenseSlots::advance(std::size_t bytes) {
  if (!pending_) return false;
  File& file = *slots_[pending_->slot];
  const std::size_t total = payload_bytes(pending_->header);
  const std::size_t from = pending_->done_bytes;
  const std::size_t left = format::align_up(total, format::block_bytes) - from;
  const std::size_t part = bytes < left ? format::align_up(bytes, format::block_bytes) : left;
  std::byte* payload = file.data() + format::dense_payload_offset;
  DialService service(medium_.dial(), {.stream_written_bytes = part});
  if (from == 0) clear_header(pending_->slot);
  if (part != 0) file.write(format::dense_payload_offset + from, staging_.data() + from, part);
  medium_.persist(payload + from, part);
  service.finish();
  pending_->done_bytes += part;
  if (pending_->done_bytes < total) return false;

  pending_->header.crc = crc_of(pending_->header, identity_.seed());
  write_header(pending_->slot, pending_->header);
  valid_[pending_->slot] = pending_->header;
  pending_.reset();
  return true;
}

}  // namespace holdfast

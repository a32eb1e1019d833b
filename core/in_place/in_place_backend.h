// In-place backend: rows mapped and overwritten where they are, an undo log for the way back.
//
// Invariants
// - Before update writes a row home, the record with its before-image is sealed (durable at the pool's level).
// - The commit record of step s is written after the rows of s are home.
// - Log records of steps after the newest valid dense slot are kept: exact recovery rolls back to that slot.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/background.h"
#include "in_place/in_place_store.h"
#include "in_place/undo.h"
#include "in_place/undo_log.h"
#include "layout/superblock.h"
#include "step/row_backend.h"

namespace holdfast {

class InPlaceBackend final : public RowBackend {
 public:
  struct Options {
    std::uint32_t dense_interval;
    bool grow_log;  // make the log larger when batches want it
    bool in_group;  // what is given up is known some steps late
    std::function<void()> finish_pending;  // makes durable what is on its way, instead of waiting for it
  };

  static void create(Medium& medium, const std::vector<RowTable>& tables, std::uint64_t log_bytes, bool row_checksums,
                     bool adopt, const Identity& identity);
  InPlaceBackend(Medium& medium, Superblock& superblock, Background& background, Options options);

  StepMark newest() override;
  void check_roll_back(std::uint64_t epoch, std::uint64_t step) override;
  RolledBack roll_back(std::uint64_t epoch, std::uint64_t step) override;
  void start(std::uint64_t epoch, const StepMark& mark) override;

  void announce(std::shared_ptr<const Plan>) override {}
  std::shared_ptr<Capture> capture(std::shared_ptr<const Plan> plan, std::uint64_t step) override;
  // All but the rows that this step's only capture updates too: these are handed over by update.
  bool capture_ahead(std::shared_ptr<const Plan> next, std::uint64_t step) override;
  void keep_rows(std::uint32_t, std::vector<std::uint64_t>) override {}
  void read(const Plan& plan, const std::vector<WorkingRows>& rows) override;
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) override {
    return store_.touched_rows(table, first, count);
  }
  void read_state(std::uint32_t table, const WorkingRows& rows, std::size_t count) override {
    store_.read_state(table, rows, count);
  }

  DialWork lookups_of(const Plan& plan, const std::vector<std::uint64_t>& num_lookups) const override;
  void begin_update() override;
  std::optional<NamedRow> update(const std::shared_ptr<const Capture>& capture, const float* grad,
                                 const UpdateSpec& spec) override;
  std::optional<NamedRow> update(const SummedGradients& gradients, const UpdateSpec& spec) override;
  // Hands no rows over: a capture of the next step that was begun is dropped.
  std::optional<NamedRow> put(const std::shared_ptr<const Capture>& capture,
                              const std::vector<ReadyRows>& ready) override;
  void finish_update(std::size_t num_captures) override;

  void check_go_back(std::uint64_t epoch, std::uint64_t step) override;
  RolledBack go_back(std::uint64_t epoch, const StepMark& mark) override;

  std::uint64_t materialize(const Plan& plan) override;
  std::optional<RowMapping> mapping(std::uint32_t table) const override { return store_.mapping(table); }

  std::function<void()> end_step(const StepMark& mark) override;
  void note_recoverable(std::uint64_t step) override { log_.release(step); }
  void empty_log() override {}  // rows are home, and the log's space is free once it is given up
  bool log_is_low() const override;
  bool step_has_begun() const override;

  void import_rows(std::size_t table, const ImportedRows& imported) override;
  void close(bool updated) override;
  void stop() noexcept override {}

  std::uint64_t log_bytes() const override { return log_.ring_bytes(); }
  std::uint64_t log_bytes_free() const override { return log_.free_bytes(); }
  Merging merging() const override { return Merging::none; }
  std::optional<Traffic> traffic() const override { return std::nullopt; }

 private:
  // A log record, and the working set that lookup and update read.
  struct LoggedCapture final : Capture {
    std::uint64_t position;
    std::optional<std::uint32_t> payload_crc;  // of the record, where it was taken along with the copy
    Background::Ticket sealed = 0;             // 0: the seal is not submitted yet
    bool is_damaged = false;                   // a row does not hold its checksum
    bool has_reused_rows = false;              // of a key that left them: this capture cannot be made ahead
    // By table, the working set where it is not the record itself: where a row was another key's, whose value is the
    // before-image.
    std::vector<std::vector<std::byte>> apart;
  };
  using RowRange = std::pair<std::size_t, std::size_t>;
  struct Ahead {
    std::shared_ptr<LoggedCapture> capture;
    std::weak_ptr<const Capture> current;  // of the step that hands rows over
    std::vector<std::vector<std::uint32_t>> forward;  // per table: current's row → capture's row
    Background::Ticket copied;
    bool complete;  // the current step's update has handed its rows over
  };
  struct Part {
    std::weak_ptr<LoggedCapture> capture;
    std::uint64_t position;
    Background::Ticket sealed;
  };

  enum class Room { found, made };
  // A capture with a place in the log, or nothing where none is found.
  std::shared_ptr<LoggedCapture> reserve(std::shared_ptr<const Plan> plan, std::uint64_t step, Room room);
  std::uint64_t spare_steps() const;
  std::size_t wanted_log_bytes(std::size_t step_bytes) const;
  void grow_log(std::size_t record_bytes);
  std::uint64_t make_room(std::uint64_t step, std::size_t bytes);
  void move_parts(std::vector<Part>::iterator first, const std::function<void()>& change);
  void put_back(const std::shared_ptr<LoggedCapture>& capture, std::span<const std::byte> bytes, const std::byte* from);
  DialWork reads_of(const Plan& plan) const;
  // Of an update: rows home, and those read again that the cache had no room for.
  DialWork writes_of(const CollectionSpec& spec, const std::function<std::uint64_t(std::size_t t)>& num_rows) const;
  enum class Rows { copied_now, copied_later };
  void fill(LoggedCapture& capture, Rows rows);
  void set_apart(LoggedCapture& capture, std::size_t table);
  void submit_seal(LoggedCapture& capture);
  // Of a capture that was begun ahead: the rows that nobody hands over.
  void copy_ahead(LoggedCapture& capture, const std::vector<std::vector<RowRange>>& own) const;
  void add_part(const std::shared_ptr<LoggedCapture>& capture);
  void drop_dead_captures();
  void drop_ahead();
  const Ahead* forwarding(const Capture& capture) const;

  Medium& medium_;
  Superblock& superblock_;
  Background& background_;
  Options options_;
  InPlaceStore store_;
  std::unique_ptr<File> ring_;
  UndoLog log_;
  std::optional<UndoPlan> undo_;  // between check_roll_back and start
  std::uint64_t epoch_ = 0;
  std::uint64_t num_captures_ = 0;
  bool updated_ = false;  // the current step has written rows home
  std::vector<Part> parts_;  // of the current step, in the order of the log
  std::optional<Ahead> ahead_;
};

}  // namespace holdfast

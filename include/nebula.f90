! nebula.f90 - Nebula for Fortran 2018: sessions, checkpoints, and arrays of any rank. A program compiles this file with its own compiler, since
! the modules of compilers differ, and links with libnebula.
!
!     use nebula
!     type(nebula_session) :: session
!     type(nebula_checkpoint) :: checkpoint
!
!     call session%open('/scratch/run7')
!     call session%latest(checkpoint, status)                 ! NEBULA_NOT_FOUND: begin from the start
!     call checkpoint%load('state.pt', 'temperature', temperature)
!     ...
!     call session%begin('step50', checkpoint)
!     call checkpoint%add('temperature', temperature)
!     call checkpoint%save('state.pt')
!     call checkpoint%commit()                                ! waits for no copy and no storage
!
! Each procedure has an optional `status`, one of the numbers below. Without it, a failure ends the program with the message. The file is a
! torch file: there, an array has its dimensions in reverse order, because Fortran's first index runs fastest.
module nebula
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: error_unit, int32, int64, real32, real64
  implicit none
  private

  integer, parameter, public :: NEBULA_OK = 0, NEBULA_TIMEOUT = 10, NEBULA_BUSY = 11, NEBULA_NOT_FOUND = 20, NEBULA_STORAGE = 21, &
    NEBULA_NO_SPACE = 22, NEBULA_CORRUPT = 23, NEBULA_FAILED = 30, NEBULA_NO_MEMORY = 31, NEBULA_UNAVAILABLE = 40, &
    NEBULA_INTERNAL = 41, NEBULA_INVALID = 50
  integer, parameter, public :: NEBULA_STATE_CAPTURED = 1, NEBULA_STATE_COMMITTED = 2, NEBULA_STATE_REPLICATED = 3, &
    NEBULA_STATE_DURABLE = 4
  integer, parameter, public :: NEBULA_REPORT_VERSIONS = 0, NEBULA_REPORT_STATUS = 1, NEBULA_REPORT_HISTORY = 2
  integer, parameter, public :: NEBULA_FILES_OPEN = -1, NEBULA_FILES_ALL_RANKS = -2
  public :: nebula_session, nebula_checkpoint, nebula_last_message
  public :: nebula_c_error, nebula_finish ! for nebula_mpi.f90

  integer, parameter :: DTYPE_I32 = 3, DTYPE_I64 = 4, DTYPE_F32 = 7, DTYPE_F64 = 8, DTYPE_C64 = 9, DTYPE_C128 = 10, DIM_MAX = 15

  ! The structures of nebula.h, with room for those of a later library.
  type, bind(c) :: nebula_c_error
    integer(c_int) :: status, sys_errno, http_status
    character(kind=c_char) :: message(512)
    character(kind=c_char) :: room(500)
  end type
  type, bind(c) :: c_options
    integer(c_size_t) :: struct_size
    type(c_ptr) :: persist_path, job, output_dir, run
    real(c_double) :: persist_interval_s
    integer(c_int32_t) :: retention_count, rank, world, local_rank, local_world
    integer(c_int64_t) :: memory_bytes
    character(kind=c_char) :: room(2000)
  end type
  type, bind(c) :: c_tensor
    type(c_ptr) :: name
    integer(c_int) :: dtype
    integer(c_int32_t) :: dim_count
    integer(c_int64_t) :: shape(16)
    type(c_ptr) :: data
  end type

  type :: described
    character(kind=c_char, len=:), allocatable :: name
    type(c_tensor) :: tensor
  end type

  type :: nebula_session
    private
    type(c_ptr) :: handle = c_null_ptr
  contains
    procedure :: open => session_open
    procedure :: begin => session_begin
    procedure :: latest => session_latest
    procedure :: find => session_find
    procedure :: flush => session_flush
    procedure :: report => session_report
    procedure :: c_handle => session_handle ! for calls of nebula.h that this module lacks
    procedure :: take => session_take ! a handle of nebula.h, which it then owns
    procedure :: close => session_close
  end type

  type :: nebula_checkpoint
    private
    type(c_ptr) :: handle = c_null_ptr
    type(described), allocatable :: added(:)
  contains
    procedure :: tag => checkpoint_tag
    procedure :: save => checkpoint_save
    procedure :: commit => checkpoint_commit
    procedure :: fail => checkpoint_fail
    procedure :: wait => checkpoint_wait
    procedure :: free => checkpoint_free
    procedure :: c_handle => checkpoint_handle
    procedure :: take => checkpoint_take ! a handle of nebula.h, which it then owns
    procedure, private :: add_i32, add_i64, add_f32, add_f64, add_c64, add_c128
    ! Describes an array of the next save. It must be contiguous and stay allocated until `save` has returned.
    generic :: add => add_i32, add_i64, add_f32, add_f64, add_c64, add_c128
    procedure, private :: load_i32, load_i64, load_f32, load_f64, load_c64, load_c128
    ! Copies an array of a file into one of the same type and shape. NEBULA_INVALID: it has another type or shape in the checkpoint.
    generic :: load => load_i32, load_i64, load_f32, load_f64, load_c64, load_c128
  end type

  character(len=512), save :: message = ''

  interface
    subroutine c_options_init(options) bind(c, name='nebula_options_init')
      import :: c_options
      type(c_options), intent(out) :: options
    end subroutine
    integer(c_int) function c_session_open(options, session, error) bind(c, name='nebula_session_open')
      import :: c_int, c_options, c_ptr, nebula_c_error
      type(c_options), intent(in) :: options
      type(c_ptr), intent(out) :: session
      type(nebula_c_error), intent(out) :: error
    end function
    subroutine c_session_close(session) bind(c, name='nebula_session_close')
      import :: c_ptr
      type(c_ptr), value :: session
    end subroutine
    integer(c_int) function c_session_flush(session, tag, timeout_ms, error) bind(c, name='nebula_session_flush')
      import :: c_int, c_int64_t, c_ptr, nebula_c_error
      type(c_ptr), value :: session, tag
      integer(c_int64_t), value :: timeout_ms
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_begin(session, tag, file_count, checkpoint, error) bind(c, name='nebula_checkpoint_begin')
      import :: c_int, c_int64_t, c_ptr, nebula_c_error, c_char
      type(c_ptr), value :: session
      character(kind=c_char), intent(in) :: tag(*)
      integer(c_int64_t), value :: file_count
      type(c_ptr), intent(out) :: checkpoint
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_latest(session, path, checkpoint, error) bind(c, name='nebula_checkpoint_latest')
      import :: c_int, c_ptr, nebula_c_error
      type(c_ptr), value :: session, path
      type(c_ptr), intent(out) :: checkpoint
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_find(session, tag, path, checkpoint, error) bind(c, name='nebula_checkpoint_find')
      import :: c_int, c_ptr, nebula_c_error, c_char
      type(c_ptr), value :: session, path
      character(kind=c_char), intent(in) :: tag(*)
      type(c_ptr), intent(out) :: checkpoint
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_save(checkpoint, name, tensors, count, error) bind(c, name='nebula_checkpoint_save_tensors')
      import :: c_int, c_size_t, c_ptr, nebula_c_error, c_char, c_tensor
      type(c_ptr), value :: checkpoint
      character(kind=c_char), intent(in) :: name(*)
      type(c_tensor), intent(in) :: tensors(*)
      integer(c_size_t), value :: count
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_commit(checkpoint, error) bind(c, name='nebula_checkpoint_commit')
      import :: c_int, c_ptr, nebula_c_error
      type(c_ptr), value :: checkpoint
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_fail(checkpoint, reason, error) bind(c, name='nebula_checkpoint_fail')
      import :: c_int, c_ptr, nebula_c_error, c_char
      type(c_ptr), value :: checkpoint
      character(kind=c_char), intent(in) :: reason(*)
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_report(session, which, path, text, error) bind(c, name='nebula_session_report')
      import :: c_int, c_ptr, nebula_c_error
      type(c_ptr), value :: session, path
      integer(c_int), value :: which
      type(c_ptr), intent(out) :: text
      type(nebula_c_error), intent(out) :: error
    end function
    subroutine c_text_free(text) bind(c, name='nebula_text_free')
      import :: c_ptr
      type(c_ptr), value :: text
    end subroutine
    integer(c_int) function c_wait(checkpoint, state, timeout_ms, error) bind(c, name='nebula_checkpoint_wait')
      import :: c_int, c_int64_t, c_ptr, nebula_c_error
      type(c_ptr), value :: checkpoint
      integer(c_int), value :: state
      integer(c_int64_t), value :: timeout_ms
      type(nebula_c_error), intent(out) :: error
    end function
    type(c_ptr) function c_tag(checkpoint) bind(c, name='nebula_checkpoint_tag')
      import :: c_ptr
      type(c_ptr), value :: checkpoint
    end function
    subroutine c_free(checkpoint) bind(c, name='nebula_checkpoint_free')
      import :: c_ptr
      type(c_ptr), value :: checkpoint
    end subroutine
    integer(c_int) function c_map(checkpoint, name, map, error) bind(c, name='nebula_checkpoint_map')
      import :: c_int, c_ptr, nebula_c_error, c_char
      type(c_ptr), value :: checkpoint
      character(kind=c_char), intent(in) :: name(*)
      type(c_ptr), intent(out) :: map
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_map_tensor(map, name, tensor, error) bind(c, name='nebula_map_tensor')
      import :: c_int, c_ptr, nebula_c_error, c_char, c_tensor
      type(c_ptr), value :: map
      character(kind=c_char), intent(in) :: name(*)
      type(c_tensor), intent(out) :: tensor
      type(nebula_c_error), intent(out) :: error
    end function
    subroutine c_map_free(map) bind(c, name='nebula_map_free')
      import :: c_ptr
      type(c_ptr), value :: map
    end subroutine
    integer(c_size_t) function c_strlen(text) bind(c, name='strlen')
      import :: c_size_t, c_ptr
      type(c_ptr), value :: text
    end function
    subroutine c_memcpy(target, source, size) bind(c, name='memcpy')
      import :: c_size_t, c_ptr
      type(c_ptr), value :: target, source
      integer(c_size_t), value :: size
    end subroutine
  end interface

contains

  ! The message of the last call that failed.
  function nebula_last_message() result(text)
    character(len=:), allocatable :: text

    text = trim(message)
  end function

  subroutine nebula_finish(found, error, status)
    integer(c_int), intent(in) :: found
    type(nebula_c_error), intent(in) :: error
    integer, intent(out), optional :: status
    integer :: i

    if (found /= NEBULA_OK) then
      message = ''
      do i = 1, len(message)
        if (error%message(i) == c_null_char) exit
        message(i:i) = error%message(i)
      end do
    end if
    call leave(int(found), status)
  end subroutine

  subroutine leave(found, status)
    integer, intent(in) :: found
    integer, intent(out), optional :: status

    if (present(status)) then
      status = found
    else if (found /= NEBULA_OK) then
      write (error_unit, '(a)') 'nebula: ' // trim(message)
      error stop 1
    end if
  end subroutine

  ! rank, world: of this process in its job; local_rank, local_world: among those of its node. Without them: one process.
  subroutine session_open(self, path, rank, world, local_rank, local_world, status)
    class(nebula_session), intent(inout) :: self
    character(len=*), intent(in) :: path
    integer, intent(in), optional :: rank, world, local_rank, local_world
    integer, intent(out), optional :: status
    character(kind=c_char, len=:), allocatable, target :: text
    type(c_options) :: options
    type(nebula_c_error) :: error

    text = trim(path) // c_null_char
    call c_options_init(options)
    options%persist_path = c_loc(text)
    if (present(rank)) options%rank = int(rank, c_int32_t)
    if (present(world)) options%world = int(world, c_int32_t)
    if (present(local_rank)) options%local_rank = int(local_rank, c_int32_t)
    if (present(local_world)) options%local_world = int(local_world, c_int32_t)
    call nebula_finish(c_session_open(options, self%handle, error), error, status)
  end subroutine

  ! Waits for running copies; the agent then works on in the background.
  subroutine session_close(self)
    class(nebula_session), intent(inout) :: self

    if (c_associated(self%handle)) call c_session_close(self%handle)
    self%handle = c_null_ptr
  end subroutine

  ! file_count: how many files complete the checkpoint; without it, it is complete when every rank has committed.
  subroutine session_begin(self, tag, checkpoint, file_count, status)
    class(nebula_session), intent(in) :: self
    character(len=*), intent(in) :: tag
    type(nebula_checkpoint), intent(inout) :: checkpoint
    integer, intent(in), optional :: file_count
    integer, intent(out), optional :: status
    integer(c_int64_t) :: files
    type(nebula_c_error) :: error

    files = NEBULA_FILES_ALL_RANKS
    if (present(file_count)) files = file_count
    call checkpoint%free()
    call nebula_finish(c_begin(self%handle, trim(tag) // c_null_char, files, checkpoint%handle, error), error, status)
  end subroutine

  ! Finds the newest complete checkpoint.
  subroutine session_latest(self, checkpoint, status)
    class(nebula_session), intent(in) :: self
    type(nebula_checkpoint), intent(inout) :: checkpoint
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error

    call checkpoint%free()
    call nebula_finish(c_latest(self%handle, c_null_ptr, checkpoint%handle, error), error, status)
  end subroutine

  subroutine session_find(self, tag, checkpoint, status)
    class(nebula_session), intent(in) :: self
    character(len=*), intent(in) :: tag
    type(nebula_checkpoint), intent(inout) :: checkpoint
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error

    call checkpoint%free()
    call nebula_finish(c_find(self%handle, trim(tag) // c_null_char, c_null_ptr, checkpoint%handle, error), error, status)
  end subroutine

  ! Waits until all committed checkpoints are durable. timeout_ms: without it there is no limit.
  subroutine session_flush(self, timeout_ms, status)
    class(nebula_session), intent(in) :: self
    integer, intent(in), optional :: timeout_ms
    integer, intent(out), optional :: status
    integer(c_int64_t) :: limit
    type(nebula_c_error) :: error

    limit = -1
    if (present(timeout_ms)) limit = timeout_ms
    call nebula_finish(c_session_flush(self%handle, c_null_ptr, limit, error), error, status)
  end subroutine

  ! JSON. which: without it NEBULA_REPORT_VERSIONS, the checkpoints in memory and in storage.
  subroutine session_report(self, text, which, status)
    class(nebula_session), intent(in) :: self
    character(len=:), allocatable, intent(out) :: text
    integer, intent(in), optional :: which
    integer, intent(out), optional :: status
    integer(c_int) :: wanted, found
    type(c_ptr) :: letters
    type(nebula_c_error) :: error

    wanted = NEBULA_REPORT_VERSIONS
    if (present(which)) wanted = int(which, c_int)
    found = c_report(self%handle, wanted, c_null_ptr, letters, error)
    text = ''
    if (found == NEBULA_OK) then
      text = text_of(letters)
      call c_text_free(letters)
    end if
    call nebula_finish(found, error, status)
  end subroutine

  function checkpoint_tag(self) result(text)
    class(nebula_checkpoint), intent(in) :: self
    character(len=:), allocatable :: text

    text = text_of(c_tag(self%handle))
  end function

  function text_of(found) result(text)
    type(c_ptr), intent(in) :: found
    character(len=:), allocatable :: text
    character(kind=c_char), pointer :: letters(:)
    integer :: i

    call c_f_pointer(found, letters, [c_strlen(found)])
    allocate (character(len=size(letters)) :: text)
    do i = 1, size(letters)
      text(i:i) = letters(i)
    end do
  end function

  ! Saves the arrays that were added as one file. The program may change them when this returns. After a failure they are still those of the next save.
  subroutine checkpoint_save(self, name, status)
    class(nebula_checkpoint), intent(inout), target :: self
    character(len=*), intent(in) :: name
    integer, intent(out), optional :: status
    type(c_tensor), allocatable :: tensors(:)
    type(nebula_c_error) :: error
    integer(c_int) :: found
    integer :: i

    if (.not. allocated(self%added)) allocate (self%added(0))
    allocate (tensors(size(self%added)))
    do i = 1, size(tensors)
      tensors(i) = self%added(i)%tensor
      tensors(i)%name = c_loc(self%added(i)%name)
    end do
    found = c_save(self%handle, trim(name) // c_null_char, tensors, size(tensors, kind=c_size_t), error)
    if (found == NEBULA_OK) deallocate (self%added)
    call nebula_finish(found, error, status)
  end subroutine

  ! Closes this rank's part. It waits for no other rank.
  subroutine checkpoint_commit(self, status)
    class(nebula_checkpoint), intent(inout) :: self
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error

    call nebula_finish(c_commit(self%handle, error), error, status)
  end subroutine

  ! Gives this checkpoint up; earlier complete ones stay.
  subroutine checkpoint_fail(self, reason, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: reason
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error

    call nebula_finish(c_fail(self%handle, reason // c_null_char, error), error, status)
  end subroutine

  ! state: without it NEBULA_STATE_DURABLE. timeout_ms: without it there is no limit.
  subroutine checkpoint_wait(self, state, timeout_ms, status)
    class(nebula_checkpoint), intent(in) :: self
    integer, intent(in), optional :: state, timeout_ms
    integer, intent(out), optional :: status
    integer(c_int64_t) :: limit
    integer(c_int) :: wanted
    type(nebula_c_error) :: error

    limit = -1
    if (present(timeout_ms)) limit = timeout_ms
    wanted = NEBULA_STATE_DURABLE
    if (present(state)) wanted = int(state, c_int)
    call nebula_finish(c_wait(self%handle, wanted, limit, error), error, status)
  end subroutine

  subroutine checkpoint_free(self)
    class(nebula_checkpoint), intent(inout) :: self

    if (c_associated(self%handle)) call c_free(self%handle)
    self%handle = c_null_ptr
    if (allocated(self%added)) deallocate (self%added)
  end subroutine

  function session_handle(self) result(handle)
    class(nebula_session), intent(in) :: self
    type(c_ptr) :: handle

    handle = self%handle
  end function

  function checkpoint_handle(self) result(handle)
    class(nebula_checkpoint), intent(in) :: self
    type(c_ptr) :: handle

    handle = self%handle
  end function

  subroutine session_take(self, handle)
    class(nebula_session), intent(inout) :: self
    type(c_ptr), intent(in) :: handle

    call self%close()
    self%handle = handle
  end subroutine

  subroutine checkpoint_take(self, handle)
    class(nebula_checkpoint), intent(inout) :: self
    type(c_ptr), intent(in) :: handle

    call self%free()
    self%handle = handle
  end subroutine

  subroutine add(self, name, dtype, extents, data)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    integer, intent(in) :: dtype
    integer(int64), intent(in) :: extents(:)
    type(c_ptr), intent(in) :: data
    type(described), allocatable :: grown(:)
    integer :: count

    if (.not. allocated(self%added)) allocate (self%added(0))
    count = size(self%added)
    allocate (grown(count + 1))
    grown(:count) = self%added
    grown(count + 1)%name = trim(name) // c_null_char
    grown(count + 1)%tensor%dtype = int(dtype, c_int)
    grown(count + 1)%tensor%dim_count = int(size(extents), c_int32_t)
    grown(count + 1)%tensor%shape = 0
    grown(count + 1)%tensor%shape(:size(extents)) = extents(size(extents):1:-1)
    grown(count + 1)%tensor%data = data
    call move_alloc(grown, self%added)
  end subroutine

  subroutine load(self, file, name, dtype, extents, width, data, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    integer, intent(in) :: dtype, width
    integer(int64), intent(in) :: extents(:)
    type(c_ptr), intent(in) :: data
    integer, intent(out), optional :: status
    type(c_ptr) :: map
    type(c_tensor) :: found
    type(nebula_c_error) :: error
    integer(c_int) :: got
    integer(c_int64_t) :: wanted(size(extents))
    logical :: same

    map = c_null_ptr
    same = .true.
    got = c_map(self%handle, trim(file) // c_null_char, map, error)
    if (got == NEBULA_OK) got = c_map_tensor(map, trim(name) // c_null_char, found, error)
    if (got == NEBULA_OK) then
      wanted = extents(size(extents):1:-1)
      same = found%dtype == dtype .and. found%dim_count == size(extents)
      if (same) same = all(found%shape(:size(extents)) == wanted)
      if (same) then
        call c_memcpy(data, found%data, int(product(wanted) * width, c_size_t))
      else
        message = 'array "' // trim(name) // '" of file "' // trim(file) // '" has another type or shape in the checkpoint'
      end if
    end if
    if (c_associated(map)) call c_map_free(map)
    if (same) then
      call nebula_finish(got, error, status)
    else
      call leave(NEBULA_INVALID, status)
    end if
  end subroutine

  subroutine add_i32(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    integer(int32), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_I32, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_i32(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    integer(int32), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_I32, shape(array, kind=int64), 4, c_loc(array), status)
  end subroutine

  subroutine add_i64(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    integer(int64), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_I64, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_i64(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    integer(int64), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_I64, shape(array, kind=int64), 8, c_loc(array), status)
  end subroutine

  subroutine add_f32(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    real(real32), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_F32, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_f32(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    real(real32), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_F32, shape(array, kind=int64), 4, c_loc(array), status)
  end subroutine

  subroutine add_f64(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    real(real64), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_F64, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_f64(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    real(real64), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_F64, shape(array, kind=int64), 8, c_loc(array), status)
  end subroutine

  subroutine add_c64(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    complex(real32), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_C64, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_c64(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    complex(real32), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_C64, shape(array, kind=int64), 8, c_loc(array), status)
  end subroutine

  subroutine add_c128(self, name, array)
    class(nebula_checkpoint), intent(inout) :: self
    character(len=*), intent(in) :: name
    complex(real64), intent(in), target, contiguous :: array(..)

    call add(self, name, DTYPE_C128, shape(array, kind=int64), c_loc(array))
  end subroutine

  subroutine load_c128(self, file, name, array, status)
    class(nebula_checkpoint), intent(in) :: self
    character(len=*), intent(in) :: file, name
    complex(real64), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(self, file, name, DTYPE_C128, shape(array, kind=int64), 16, c_loc(array), status)
  end subroutine

end module nebula

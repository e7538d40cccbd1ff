! nebula_mpi.f90 - nebula_mpi.h for Fortran 2018: arrays of a job of MPI that another number of ranks can load. A program compiles this file and
! nebula_mpi_fortran.c beside nebula.f90.
!
!     call nebula_open(comm, session, '/scratch/run7')
!     call nebula_latest(comm, session, checkpoint, status)              ! NEBULA_NOT_FOUND: begin from the start
!     call nebula_load_block(comm, checkpoint, 'heat', global, from, heat)
!     ...
!     call session%begin('step50', checkpoint)
!     call nebula_save_block(comm, checkpoint, 'heat', global, from, heat)
!     call checkpoint%commit()
!
! Each rank of `comm` makes the calls, in the same order, and gets the same status. comm: of `use mpi`; that of mpi_f08 has it as comm%mpi_val.
! global: the extents of the whole array. from: the index of the first element of this rank's block in it, from 1. The extents of the block are
! those of the array that is given. Block by block, all ranks cover the whole array, each element once. C sees the dimensions in reverse order.
module nebula_mpi
  use nebula
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: int32, int64, real32, real64
  implicit none
  private
  public :: nebula_open, nebula_latest, nebula_save_block, nebula_load_block

  integer(c_int), parameter :: DTYPE_I32 = 3, DTYPE_I64 = 4, DTYPE_F32 = 7, DTYPE_F64 = 8

  type, bind(c) :: c_block
    integer(c_int) :: dtype
    integer(c_int32_t) :: dim_count
    integer(c_int64_t) :: global(16), from(16), extent(16)
  end type

  interface
    integer(c_int) function c_open(comm, path, session, error) bind(c, name='nebula_mpi_fortran_open')
      import :: c_int, c_ptr, c_char, nebula_c_error
      integer(c_int), value :: comm
      character(kind=c_char), intent(in) :: path(*)
      type(c_ptr), intent(out) :: session
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_latest(comm, session, checkpoint, error) bind(c, name='nebula_mpi_fortran_latest')
      import :: c_int, c_ptr, nebula_c_error
      integer(c_int), value :: comm
      type(c_ptr), value :: session
      type(c_ptr), intent(out) :: checkpoint
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_save(comm, checkpoint, name, block, data, error) bind(c, name='nebula_mpi_fortran_save')
      import :: c_int, c_ptr, c_char, c_block, nebula_c_error
      integer(c_int), value :: comm
      type(c_ptr), value :: checkpoint, data
      character(kind=c_char), intent(in) :: name(*)
      type(c_block), intent(in) :: block
      type(nebula_c_error), intent(out) :: error
    end function
    integer(c_int) function c_load(comm, checkpoint, name, block, data, error) bind(c, name='nebula_mpi_fortran_load')
      import :: c_int, c_ptr, c_char, c_block, nebula_c_error
      integer(c_int), value :: comm
      type(c_ptr), value :: checkpoint, data
      character(kind=c_char), intent(in) :: name(*)
      type(c_block), intent(in) :: block
      type(nebula_c_error), intent(out) :: error
    end function
  end interface

  ! Saves the block of each rank. The program may change the array when this returns.
  interface nebula_save_block
    module procedure save_i32, save_i64, save_f32, save_f64
  end interface
  ! Loads each rank's block of an array that any number of ranks has saved. NEBULA_INVALID: it has another type or shape in the checkpoint.
  interface nebula_load_block
    module procedure load_i32, load_i64, load_f32, load_f64
  end interface

contains

  ! Opens the session of each rank. Rank and world come from MPI.
  subroutine nebula_open(comm, session, path, status)
    integer, intent(in) :: comm
    type(nebula_session), intent(inout) :: session
    character(len=*), intent(in) :: path
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error
    type(c_ptr) :: handle
    integer(c_int) :: opened

    handle = c_null_ptr
    opened = c_open(int(comm, c_int), trim(path) // c_null_char, handle, error)
    call session%take(handle)
    call nebula_finish(opened, error, status)
  end subroutine

  ! Finds the newest complete checkpoint that all ranks have.
  subroutine nebula_latest(comm, session, checkpoint, status)
    integer, intent(in) :: comm
    type(nebula_session), intent(in) :: session
    type(nebula_checkpoint), intent(inout) :: checkpoint
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error
    type(c_ptr) :: handle
    integer(c_int) :: found

    handle = c_null_ptr
    found = c_latest(int(comm, c_int), session%c_handle(), handle, error)
    call checkpoint%take(handle)
    call nebula_finish(found, error, status)
  end subroutine

  function block_of(dtype, global, from, extents) result(made)
    integer(c_int), intent(in) :: dtype
    integer, intent(in) :: global(:), from(:)
    integer(int64), intent(in) :: extents(:)
    type(c_block) :: made
    integer :: count

    count = size(extents)
    made%dtype = dtype
    made%dim_count = 0 ! which no block has: the library then says so
    if (size(global) == count .and. size(from) == count .and. count <= 8) then
      made%dim_count = int(count, c_int32_t)
      made%global(:count) = global(count:1:-1)
      made%from(:count) = from(count:1:-1) - 1
      made%extent(:count) = extents(count:1:-1)
    end if
  end function

  subroutine save(comm, checkpoint, name, block, data, status)
    integer, intent(in) :: comm
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    type(c_block), intent(in) :: block
    type(c_ptr), intent(in) :: data
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error
    integer(c_int) :: found

    found = c_save(int(comm, c_int), checkpoint%c_handle(), trim(name) // c_null_char, block, data, error)
    call nebula_finish(found, error, status)
  end subroutine

  subroutine load(comm, checkpoint, name, block, data, status)
    integer, intent(in) :: comm
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    type(c_block), intent(in) :: block
    type(c_ptr), intent(in) :: data
    integer, intent(out), optional :: status
    type(nebula_c_error) :: error
    integer(c_int) :: found

    found = c_load(int(comm, c_int), checkpoint%c_handle(), trim(name) // c_null_char, block, data, error)
    call nebula_finish(found, error, status)
  end subroutine

  subroutine save_i32(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    integer(int32), intent(in), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call save(comm, checkpoint, name, block_of(DTYPE_I32, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine load_i32(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    integer(int32), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(comm, checkpoint, name, block_of(DTYPE_I32, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine save_i64(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    integer(int64), intent(in), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call save(comm, checkpoint, name, block_of(DTYPE_I64, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine load_i64(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    integer(int64), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(comm, checkpoint, name, block_of(DTYPE_I64, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine save_f32(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    real(real32), intent(in), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call save(comm, checkpoint, name, block_of(DTYPE_F32, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine load_f32(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    real(real32), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(comm, checkpoint, name, block_of(DTYPE_F32, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine save_f64(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    real(real64), intent(in), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call save(comm, checkpoint, name, block_of(DTYPE_F64, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

  subroutine load_f64(comm, checkpoint, name, global, from, array, status)
    integer, intent(in) :: comm, global(:), from(:)
    type(nebula_checkpoint), intent(in) :: checkpoint
    character(len=*), intent(in) :: name
    real(real64), intent(inout), target, contiguous :: array(..)
    integer, intent(out), optional :: status

    call load(comm, checkpoint, name, block_of(DTYPE_F64, global, from, shape(array, kind=int64)), c_loc(array), status)
  end subroutine

end module nebula_mpi

! Saves a matrix by columns, or loads it by rows on another number of ranks. For test_installed.py.
program blocks
  use mpi
  use nebula
  use nebula_mpi
  use, intrinsic :: iso_fortran_env, only: real64
  implicit none
  integer, parameter :: rows = 5, columns = 7
  type(nebula_session) :: session
  type(nebula_checkpoint) :: checkpoint
  real(real64), allocatable :: own(:, :)
  integer :: rank, world, ierror, status, i, k, from(2), extent(2), wrong, cut
  character(len=1000) :: path, what

  call MPI_Init(ierror)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierror)
  call MPI_Comm_size(MPI_COMM_WORLD, world, ierror)
  call get_command_argument(1, path)
  call get_command_argument(2, what)
  call nebula_open(MPI_COMM_WORLD, session, path)
  cut = merge(2, 1, what == 'save')
  from = 1
  extent = [rows, columns]
  from(cut) = extent(cut) * rank / world + 1
  extent(cut) = extent(cut) * (rank + 1) / world - from(cut) + 1
  allocate (own(extent(1), extent(2)), source=-1.0_real64)
  if (what == 'save') then
    do k = 1, extent(2)
      do i = 1, extent(1)
        own(i, k) = 100 * (from(1) + i - 1) + from(2) + k - 1
      end do
    end do
    call nebula_latest(MPI_COMM_WORLD, session, checkpoint, status)
    if (status /= NEBULA_NOT_FOUND) error stop 'found one'
    call session%begin('step1', checkpoint)
    call nebula_save_block(MPI_COMM_WORLD, checkpoint, 'matrix', [rows, columns], from, own)
    call checkpoint%commit()
    call checkpoint%wait(timeout_ms=60000)
  else
    call nebula_latest(MPI_COMM_WORLD, session, checkpoint)
    call nebula_load_block(MPI_COMM_WORLD, checkpoint, 'matrix', [rows, columns], from, own)
    wrong = 0
    do k = 1, extent(2)
      do i = 1, extent(1)
        if (nint(own(i, k)) /= 100 * (from(1) + i - 1) + from(2) + k - 1) wrong = wrong + 1
      end do
    end do
    call nebula_load_block(MPI_COMM_WORLD, checkpoint, 'matrix', [rows, columns + 1], from, own, status)
    print '(i0, a, i0, a, l1)', rank, ' ', wrong, ' ', status == NEBULA_INVALID
  end if
  call checkpoint%free()
  call session%close()
  call MPI_Finalize(ierror)
end program

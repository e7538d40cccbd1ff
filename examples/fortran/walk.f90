! Random walkers in Fortran: saves every 50 steps, and continues exactly where it was killed. See README.md.
program walk
  use nebula
  use, intrinsic :: iso_fortran_env, only: int64
  use, intrinsic :: iso_c_binding, only: c_int
  implicit none
  interface
    integer(c_int) function raise(signal) bind(c, name='raise')
      import :: c_int
      integer(c_int), value :: signal
    end function
  end interface
  integer(int64), parameter :: save_every = 50, last = 400
  character(len=*), parameter :: file = 'walk.pt'
  integer(int64) :: at(10, 100), random, step, crash_at, total
  integer :: status, row, column
  character(len=1000) :: path, text
  type(nebula_session) :: session
  type(nebula_checkpoint) :: checkpoint

  if (command_argument_count() < 1) stop 2
  call get_command_argument(1, path)
  crash_at = 0
  if (command_argument_count() > 1) then
    call get_command_argument(2, text)
    read (text, *) crash_at
  end if
  at = 0
  random = 1
  step = 0
  call session%open(path)
  call session%latest(checkpoint, status)
  if (status == NEBULA_OK) then
    call checkpoint%load(file, 'at', at)
    call checkpoint%load(file, 'random', random)
    call checkpoint%load(file, 'step', step)
    print '(a, i0)', 'resuming from step ', step
  else if (status == NEBULA_NOT_FOUND) then
    print '(a, i0)', 'starting from step ', step
  else
    print '(a)', nebula_last_message()
    stop 1
  end if
  do while (step < last)
    do column = 1, size(at, 2)
      do row = 1, size(at, 1)
        random = ieor(random, ishft(random, 13))
        random = ieor(random, ishft(random, -7))
        random = ieor(random, ishft(random, 17))
        at(row, column) = at(row, column) + merge(1_int64, -1_int64, random < 0)
      end do
    end do
    step = step + 1
    if (step == crash_at) status = raise(9_c_int)
    if (mod(step, save_every) == 0) then
      write (text, '(a, i0)') 'step', step
      call session%begin(text, checkpoint)
      call checkpoint%add('at', at)
      call checkpoint%add('random', random)
      call checkpoint%add('step', step)
      call checkpoint%save(file)
      call checkpoint%commit()
    end if
  end do
  call session%flush(timeout_ms=60000)
  call checkpoint%free()
  call session%close()
  total = 0
  do column = 1, size(at, 2)
    do row = 1, size(at, 1)
      total = total + (row + size(at, 1) * (column - 1)) * at(row, column)
    end do
  end do
  print '(a, i0, a, i0)', 'step ', step, ' checksum ', total
end program
